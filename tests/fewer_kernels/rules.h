#pragma once
// Included in front of a file, leaves kernels to those rules alone that keep the most numbers, with all their options,
// and to one for each number of states.
#define visit_rule visit_any_rule
#include "core/update_rule.h"
#undef visit_rule

namespace fusedtrain {

#pragma nv_exec_check_disable  // f is for the side that calls
template <class A, class F>
FUSEDTRAIN_HD void visit_rule(Rule rule, F&& f) {
  switch (rule) {
    case Rule::kSgd:
      return f.template operator()<Sgd<A>>();
    case Rule::kAmsgrad:
      return f.template operator()<Amsgrad<A>>();
    case Rule::kNovogradAmsgrad:
      return f.template operator()<Novograd<A, true>>();
    case Rule::kLambCautious:
      return f.template operator()<LambCautious<A>>();
    case Rule::kRmspropCenteredMomentumCautious:
      return f.template operator()<Rmsprop<A, true, true, true>>();
    case Rule::kAdanCautious:
      return f.template operator()<AdanCautious<A>>();
    default:
      return;
  }
}

}  // namespace fusedtrain
