// grouped_conv2d on the CPU: y and dx, of channels_last images.
//   y[p, o] = b[o] + sum_{tap, i} w[tap, i, o] * x[p at tap, i]
// A tile of sums stays in registers: pixels of one row, or of two where they are short, whose channels are broadcast,
// times vectors of output channels of a group. Its weights lie in L1, in the order of reading, and so do the pixels of
// a band of rows, which are staged with zeros around them. For dx every phase of the stride is a convolution of dy.
// bfloat16 is multiplied two channels at a time, by the instruction for that.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-split-wide-types")  // else g++ 12 keeps a third of the sums of 16 registers in memory
#endif
#include "grouped_conv2d.h"

#include "cpu/grouped.h"

namespace fusedtrain::cpu {
namespace {

constexpr int kTileVecs = 2;
constexpr int kMostSums = kVecBytes == 64 ? 24 : 12;  // vectors: with the weights and a pixel the registers are full
template <int kVecs>
constexpr int kMostCols = std::min(14, kMostSums / kVecs);
constexpr int64_t kChain = 160;  // summands, at most: the error of a sum grows with them

// Steps of one tap in one block.
struct Run {
  int64_t offset, steps;
};

// Vectors of output channels are shared out evenly over panels.
template <class E>
class Panels {
 public:
  explicit Panels(int64_t channels) : vecs_(ceil_div(channels, kLanes<E>)), count_(ceil_div(vecs_, kTileVecs)) {}
  int64_t vecs() const { return vecs_; }
  int64_t count() const { return count_; }
  int64_t begin(int64_t panel) const { return vecs_ * panel / count_; }

 private:
  int64_t vecs_, count_;
};

// The type of the results of a tile: they are narrowed later where it is not that of the images.
template <class T, class E>
using Result = std::conditional_t<std::is_same_v<E, Pair>, T, Sum<E>>;

template <class E, class R>
struct Tile {
  const E* x;     // of the first pixel
  int64_t x_row;  // from a row of the tile to the next
  const Run* runs;
  int64_t count;
  const E* weight;  // packed
  Sum<E>* before;   // the sums of earlier chains
  R* y;
  int64_t y_row, y_col;
  const Sum<E>* bias;  // or null
  int last;            // lanes of the last vector
  Ahead* ahead;
  int64_t lines;  // of it to ask for per run
};

// Sums of products of E. Those of pairs are rounded by instruction, which CPUs without pairs do not have.
template <class E, class V, class R>
[[gnu::always_inline]] inline void put(R* y, V sums, int lanes) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<E, Pair>) return store_raw(&y->bits, narrow_sums(sums), lanes);
#endif
  if (lanes == V::kLanes) {
    store(y, sums);
  } else {
    store(y, sums, FirstLanes{lanes});
  }
}

template <int kVecs, int kRows, int kCols, class E, class R>
[[gnu::noinline]] void multiply_tile(const Tile<E, R>& t) {
  using V = Vec<Sum<E>>;
  V sums[kRows][kCols][kVecs];
  const auto each_sum = [&](auto f) __attribute__((always_inline)) {
    unroll<kRows>([&](auto row) __attribute__((always_inline)) {
      unroll<kCols>([&](auto col) __attribute__((always_inline)) {
        unroll<kVecs>([&](auto v) __attribute__((always_inline)) { f(row, col, v); });
      });
    });
  };
  const auto clear = [&] {
    each_sum([&](auto row, auto col, auto v) __attribute__((always_inline)) { sums[row][col][v] = V(0); });
  };
  const auto before = [&](int row, int col, int v) { return t.before + ((row * kCols + col) * kVecs + v) * V::kLanes; };
  clear();
  each_sum([&](auto row, auto col, auto v) __attribute__((always_inline)) {
    __builtin_prefetch(t.y + row * t.y_row + col * t.y_col + v * V::kLanes, 1);
  });
  const char* ahead = t.ahead->p;
  const int64_t lines = t.ahead->any() ? t.lines : 0;
  const E* weight = t.weight;
  const int64_t x_row = t.x_row;
  const Run *run = t.runs, *const end = run + t.count;
  bool chained = false;
  for (;;) {
    for (int64_t chain = 0; run < end && (chain == 0 || chain + run->steps <= kChain); chain += run->steps, ++run) {
      const E* x = t.x + run->offset;
      for (int64_t line = 0; line < lines; ++line, ahead += kLine) __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 2
      for (int64_t step = 0; step < run->steps; ++step, ++x, weight += kVecs * kLanes<E>) {
        decltype(load_vector(weight)) w[kVecs];
        unroll<kVecs>([&](auto v) __attribute__((always_inline)) { w[v] = load_vector(weight + v * kLanes<E>); });
        unroll<kRows>([&](auto row) __attribute__((always_inline)) {
          unroll<kCols>([&](auto col) __attribute__((always_inline)) {
            const auto pixel = broadcast(x[row * x_row + col * kBlock<E>]);
            unroll<kVecs>([&](auto v) __attribute__((always_inline)) {
              sums[row][col][v] = multiply_add(sums[row][col][v], w[v], pixel);
            });
          });
        });
      }
    }
    if (run == end) break;
    each_sum([&](auto row, auto col, auto v) __attribute__((always_inline)) {
      Sum<E>* p = before(row, col, v);
      store(p, chained ? load<V>(p) + sums[row][col][v] : sums[row][col][v]);
    });
    chained = true;
    clear();
  }
  t.ahead->p = ahead;
  if (chained) {
    each_sum([&](auto row, auto col, auto v)
                 __attribute__((always_inline)) { sums[row][col][v] += load<V>(before(row, col, v)); });
  }
  if (t.bias != nullptr) {
    unroll<kVecs>([&](auto v) __attribute__((always_inline)) {
      const bool part = v == kVecs - 1 && t.last != V::kLanes;
      const V bias = part ? load<V>(t.bias + v * V::kLanes, FirstLanes{t.last}) : load<V>(t.bias + v * V::kLanes);
      unroll<kRows>([&](auto row) __attribute__((always_inline)) {
        unroll<kCols>([&](auto col) __attribute__((always_inline)) { sums[row][col][v] += bias; });
      });
    });
  }
  each_sum([&](auto row, auto col, auto v) __attribute__((always_inline)) {
    put<E>(t.y + row * t.y_row + col * t.y_col + v * V::kLanes, sums[row][col][v], v < kVecs - 1 ? V::kLanes : t.last);
  });
}

// Results of pixels [rows, cols], whose first is at t. The last tiles may begin within the ones before.
template <int kVecs, int kRows, int kCols, class E, class R>
void multiply_tiles(Tile<E, R> t, int64_t rows, int64_t cols) {
  const Tile<E, R> first = t;
  for (int64_t i = 0; i < rows; i += kRows) {
    const int64_t row = std::min(i, rows - kRows);
    for (int64_t j = 0; j < cols; j += kCols) {
      const int64_t col = std::min(j, cols - kCols);
      t.x = first.x + row * first.x_row + col * kBlock<E>;
      t.y = first.y + row * first.y_row + col * first.y_col;
      multiply_tile<kVecs, kRows, kCols>(t);
    }
  }
}

template <int kVecs, class E, class R>
void multiply_pixels(const Tile<E, R>& t, int64_t rows, int64_t cols) {
  constexpr int kMost = kMostCols<kVecs>;
  const auto choose = [&]<int... kCols>() {
    int64_t best = 1, least = cols * (kVecs + 2);
    const auto look_at = [&](int64_t width) {
      const int64_t cost = ceil_div(cols, width) * (width * kVecs + 2);
      if (width <= std::min<int64_t>(kMost, cols) && cost < least) best = width, least = cost;
    };
    (look_at(kCols), ...);
    if constexpr (kMost >= 14 && !std::is_same_v<E, double>) {
      if (cols == 7 && rows > 1) {  // more sums than the products of one row have
        multiply_tiles<kVecs, 2, 7>(t, rows / 2 * 2, cols);
        if (rows % 2 == 0) return;
        Tile<E, R> last = t;
        last.x += (rows - 1) * t.x_row;
        last.y += (rows - 1) * t.y_row;
        return multiply_tiles<kVecs, 1, 7>(last, 1, cols);
      }
    }
    visit<kCols...>(best, [&]<int kWidth>() {
      if constexpr (kWidth <= kMost) multiply_tiles<kVecs, 1, kWidth>(t, rows, cols);
    });
  };
  if constexpr (std::is_same_v<E, double>) {
    choose.template operator()<4, 1>();
  } else {
    choose.template operator()<14, 12, 10, 8, 7, 6, 4, 2, 1>();
  }
}

// Channels of a pixel, and zeros behind, as a block.
template <class T, class E>
[[gnu::always_inline]] inline void copy_block(const T* from, int64_t channels, E* to) {
  if constexpr (std::is_same_v<E, Pair>) {
    std::fill_n(to, kBlock<E>, E{});
    std::memcpy(to, from, size_t(channels) * sizeof(T));
  } else {
    for (int64_t c = 0; c < kBlock<E>; c += kLanes<E>) {
      const int64_t left = std::clamp<int64_t>(channels - c, 0, kLanes<E>);
      store(to + c, left == kLanes<E> ? load<Vec<E>>(from + c)
                    : left > 0        ? load<Vec<E>>(from + c, FirstLanes{int(left)})
                                      : Vec<E>(0));
    }
  }
}
template <class T, class E>
[[gnu::always_inline]] inline void copy_whole_block(const T* from, E* to) {
  if constexpr (std::is_same_v<E, Pair>) {
    std::memcpy(to, from, kBlockBytes);
  } else {
    for (int64_t c = 0; c < kBlock<E>; c += kLanes<E>) store(to + c, load<Vec<E>>(from + c));
  }
}

// Pixels of a row, `stride` apart; their blocks are `pitch` apart.
template <class T, class E>
void copy_pixels(const T* from, int64_t stride, int64_t count, int64_t channels, int64_t pitch, E* to) {
  constexpr int64_t kChannels = kBlock<E> * (std::is_same_v<E, Pair> ? 2 : 1);
  for (; channels > 0; channels -= kChannels, from += kChannels, to += pitch) {
    if (channels >= kChannels) {
      for (int64_t i = 0; i < count; ++i) copy_whole_block(from + i * stride, to + i * kBlock<E>);
    } else {
      for (int64_t i = 0; i < count; ++i) copy_block(from + i * stride, channels, to + i * kBlock<E>);
    }
  }
}

template <class T, class E>
class Convolution {
  using R = Result<T, E>;
  static constexpr bool kDirect = std::is_same_v<R, T>;

 public:
  Convolution(const GroupedConv2d& a, void* scratch)
      : a_(a),
        rows_(rows_of(a.sizes, a.transposed)),
        cols_(cols_of(a.sizes, a.transposed)),
        blocks_(blocks(a)),
        cols_staged_(staged_cols(cols_)),
        row_pitch_(cols_.step() * cols_staged_ * kBlock<E>),
        rows_staged_(rows_.inputs(ceil_div(rows_.outputs(0), bands(a)))),
        staged_(static_cast<E*>(scratch)),
        runs_(reinterpret_cast<Run*>(staged_ + blocks_ * rows_staged_ * row_pitch_)),
        before_(reinterpret_cast<Sum<E>*>(runs_ + a.sizes.kh * a.sizes.kw * blocks_)) {
    Run* run = runs_;
    each_phase([&](int64_t row_phase, int64_t col_phase) {
      for (int64_t block = 0; block < blocks_; ++block) {
        rows_.each_tap(row_phase, [&](int64_t, int64_t row) {
          cols_.each_tap(col_phase, [&](int64_t, int64_t col) {
            const int64_t c = col - cols_.low(), at = c % cols_.step() * cols_staged_ + c / cols_.step();
            *run++ = {(block * rows_staged_ + row - rows_.low()) * row_pitch_ + at * kBlock<E>,
                      std::min(kBlock<E>, steps(a) - block * kBlock<E>)};
          });
        });
      }
    });
  }

  void operator()(int64_t item) {
    const int64_t set = item % sets(a_), band = item / sets(a_) % bands(a_), image = item / sets(a_) / bands(a_);
    const int64_t all = rows_.outputs(0), begin = all * band / bands(a_), end = all * (band + 1) / bands(a_);
    const int64_t ci = in_channels(a_), channels = a_.sizes.groups * ci;
    const int64_t first = set * set_groups(a_), last = std::min(a_.sizes.groups, first + set_groups(a_));
    const T* in = static_cast<const T*>(a_.in) + image * rows_.in * cols_.in * channels + first * ci;
    const Window window{
        rows_.in,     cols_.in,    begin * rows_.step() + rows_.low(), rows_.inputs(end - begin), cols_.low(),
        cols_staged_, cols_.step()};
    stage(window, blocks_, rows_staged_ * row_pitch_, 0, staged_, [&](E* to, int64_t row, int64_t col, int64_t count) {
      copy_pixels(in + (row * cols_.in + col) * channels, cols_.step() * channels, count, (last - first) * ci,
                  rows_staged_ * row_pitch_, to);
    });
    // The rows of the next band, of which every set of this one asks for a part.
    const int64_t next = std::clamp<int64_t>(window.first_row + window.rows, 0, rows_.in) + image * rows_.in;
    const int64_t more = std::min((end - begin) * rows_.step(), a_.sizes.n * rows_.in - next);
    ahead_ = part_of(static_cast<const T*>(a_.in), channels, next * cols_.in, (next + more) * cols_.in, set, sets(a_));
    const int64_t tiles =
        (last - first) * Panels<E>(out_channels(a_)).count() * (end - begin) * ceil_div(cols_.outputs(0), kMostCols<1>);
    lines_ = ceil_div(ahead_.end - ahead_.p, kLine * std::max<int64_t>(1, tiles * a_.sizes.kh * a_.sizes.kw * blocks_));
    for (int64_t group = first; group < last; ++group)
      multiply_group(image, group, (group - first) * steps(a_), begin, end);
  }

 private:
  template <class F>
  void each_phase(F&& f) const {
    for (int64_t row = 0; row < rows_.phases(); ++row) {
      for (int64_t col = 0; col < cols_.phases(); ++col) f(row, col);
    }
  }

  void multiply_group(int64_t image, int64_t group, int64_t first_step, int64_t begin, int64_t end) {
    const int64_t co = out_channels(a_), channels = a_.sizes.groups * co;
    const Panels<E> panels(co);
    const E* weight = static_cast<const E*>(a_.packed) + group * packed_size(a_) / a_.sizes.groups / int64_t(sizeof(E));
    T* const out = static_cast<T*>(a_.out) + image * rows_.out * cols_.out * channels + group * co;
    for (int64_t panel = 0; panel < panels.count(); ++panel) {
      const int64_t from = panels.begin(panel), vecs = panels.begin(panel + 1) - from, o = from * kLanes<E>;
      const Run* runs = runs_;
      each_phase([&](int64_t row_phase, int64_t col_phase) {
        int64_t taps = 0;
        rows_.each_tap(row_phase,
                       [&](int64_t, int64_t) { cols_.each_tap(col_phase, [&](int64_t, int64_t) { ++taps; }); });
        const int64_t rows = std::min(end, rows_.outputs(row_phase)) - begin, cols = cols_.outputs(col_phase);
        if (rows > 0 && cols > 0) {
          Tile<E, R> tile{.x = staged_ + first_step,
                          .x_row = rows_.step() * row_pitch_,
                          .runs = runs,
                          .count = taps * blocks_,
                          .weight = weight,
                          .before = before_,
                          .y = nullptr,
                          .y_row = cols_.out * channels * rows_.phases(),
                          .y_col = channels * cols_.phases(),
                          .bias = a_.bias == nullptr ? nullptr : static_cast<const Sum<E>*>(a_.bias) + group * co + o,
                          .last = int(std::min<int64_t>(kLanes<E>, co - o - (vecs - 1) * kLanes<E>)),
                          .ahead = &ahead_,
                          .lines = lines_};
          T* y = out + ((begin * rows_.phases() + row_phase) * cols_.out + col_phase) * channels + o;
          visit<1, 2>(vecs, [&]<int kVecs>() { multiply_phase<kVecs>(tile, y, rows, cols); });
        }
        runs += taps * blocks_;
        weight += taps * steps(a_) * vecs * kLanes<E>;
      });
    }
  }

  template <int kVecs>
  void multiply_phase(Tile<E, R> tile, T* y, int64_t rows, int64_t cols) {
    if constexpr (kDirect) {
      tile.y = y;
      multiply_pixels<kVecs>(tile, rows, cols);
    } else {  // a few pixels at a time, to be narrowed
      constexpr int kMost = kMostCols<kVecs>;
      alignas(64) R sums[kMost * kVecs * kLanes<E>];
      const E* x = tile.x;
      const int64_t y_row = tile.y_row, y_col = tile.y_col;
      tile.y = sums;
      tile.y_col = kVecs * kLanes<E>;
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t col = 0; col < cols; col += kMost) {
          const int64_t count = std::min<int64_t>(kMost, cols - col);
          tile.x = x + row * tile.x_row + col * kBlock<E>;
          multiply_pixels<kVecs>(tile, 1, count);
          for (int64_t i = 0; i < count; ++i) {
            T* to = y + row * y_row + (col + i) * y_col;
            for (int v = 0; v < kVecs; ++v) {
              const Vec<E> result = load<Vec<E>>(sums + (i * kVecs + v) * kLanes<E>);
              put<E>(to + v * kLanes<E>, result, v < kVecs - 1 ? kLanes<E> : tile.last);
            }
          }
        }
      }
    }
  }

  const GroupedConv2d& a_;
  const Line rows_, cols_;
  const int64_t blocks_, cols_staged_, row_pitch_, rows_staged_;
  E* const staged_;
  Run* const runs_;
  Sum<E>* const before_;
  Ahead ahead_ = {};
  int64_t lines_ = 0;
};

// One tap's weights of a vector of output channels: steps `pitch` apart, of `channels` and zeros behind.
template <class T, class E>
void pack_vector(const T* from, int64_t o_stride, int64_t i_stride, int64_t lanes, int64_t channels, int64_t pitch,
                 E* to) {
  constexpr int64_t kChannels = std::is_same_v<E, Pair> ? 2 : 1;
  using V = Vec<float>;
  int64_t step = 0;
  if constexpr (std::is_same_v<T, E> || std::is_same_v<E, Pair>) {
    const int64_t whole = channels / kChannels;
    if (lanes == kLanes<E> && i_stride == 1 && sizeof(E) == 4) {
      for (int64_t count; step < whole; step += count) {
        count = std::min<int64_t>(V::kLanes, whole - step);
        V rows[V::kLanes];
        for (int i = 0; i < V::kLanes; ++i) {
          const auto* p = reinterpret_cast<const float*>(from + i * o_stride + step * kChannels);
          rows[i] = count == V::kLanes ? load<V>(p) : load<V>(p, FirstLanes{int(count)});
        }
        transpose(rows);
        for (int64_t i = 0; i < count; ++i) store(reinterpret_cast<float*>(to + (step + i) * pitch), rows[i]);
      }
    } else if (lanes == kLanes<E> && o_stride == 1) {
      for (; step < whole; ++step) {
        const T* const p = from + step * kChannels * i_stride;
        if constexpr (std::is_same_v<E, Pair>) {
          uint16_t both[2][kLanes<E>];
          std::memcpy(both[0], p, sizeof both[0]);
          std::memcpy(both[1], p + i_stride, sizeof both[1]);
          for (int i = 0; i < kLanes<E>; ++i) to[step * pitch + i].bits = both[0][i] | uint32_t(both[1][i]) << 16;
        } else {
          store(to + step * pitch, load<Vec<E>>(p));
        }
      }
    }
  }
  for (; step * kChannels < channels; ++step) {
    T row[kChannels][kLanes<E>] = {};
    for (int64_t c = step * kChannels; c < std::min(channels, (step + 1) * kChannels); ++c) {
      for (int64_t lane = 0; lane < lanes; ++lane) row[c % kChannels][lane] = from[lane * o_stride + c * i_stride];
    }
    if constexpr (std::is_same_v<E, Pair>) {
      for (int i = 0; i < kLanes<E>; ++i) to[step * pitch + i].bits = row[0][i].bits | uint32_t(row[1][i].bits) << 16;
    } else {
      store(to + step * pitch, load<Vec<E>>(row[0]));
    }
  }
}

template <class T, class E>
void pack(const GroupedConv2d& a, int64_t begin, int64_t end) {
  constexpr int64_t kChannels = std::is_same_v<E, Pair> ? 2 : 1;
  const Line rows = rows_of(a.sizes, a.transposed), cols = cols_of(a.sizes, a.transposed);
  const int64_t ci = in_channels(a), co = out_channels(a);
  const int64_t i_stride = a.weight_strides[!a.transposed], o_stride = a.weight_strides[a.transposed];
  const Panels<E> panels(co);
  // The taps of all phases and blocks in the order in which tiles meet them.
  const auto each_tap = [&](auto&& f) {
    for (int64_t row_phase = 0; row_phase < rows.phases(); ++row_phase) {
      for (int64_t col_phase = 0; col_phase < cols.phases(); ++col_phase) {
        for (int64_t c = 0; c < ci; c += kBlock<E> * kChannels) {
          rows.each_tap(row_phase, [&](int64_t ky, int64_t) {
            cols.each_tap(col_phase, [&](int64_t kx, int64_t) {
              f(ky * a.weight_strides[2] + kx * a.weight_strides[3], c, std::min(ci - c, kBlock<E> * kChannels));
            });
          });
        }
      }
    }
  };
  for (int64_t group = begin; group < end; ++group) {
    const T* const from = static_cast<const T*>(a.weight) + group * a.sizes.co * a.weight_strides[0];
    E* to = static_cast<E*>(a.packed) + group * packed_size(a) / a.sizes.groups / int64_t(sizeof(E));
    for (int64_t panel = 0; panel < panels.count(); ++panel) {
      const int64_t first = panels.begin(panel), vecs = panels.begin(panel + 1) - first, pitch = vecs * kLanes<E>;
      each_tap([&](int64_t tap, int64_t c, int64_t channels) {
        for (int64_t v = 0; v < vecs; ++v) {
          const int64_t o = (first + v) * kLanes<E>;
          pack_vector(from + tap + o * o_stride + c * i_stride, o_stride, i_stride,
                      std::min<int64_t>(kLanes<E>, co - o), channels, pitch, to + v * kLanes<E>);
        }
        to += ceil_div(channels, kChannels) * pitch;
      });
    }
  }
}

}  // namespace

template <>
void grouped_conv2d_pack<Isa::FUSEDTRAIN_ISA>(const GroupedConv2d& a, int64_t begin, int64_t end) {
  visit_elements(a.sizes, [&]<class T, class E>() { pack<T, E>(a, begin, end); });
}

template <>
void grouped_conv2d<Isa::FUSEDTRAIN_ISA>(const GroupedConv2d& a, void* scratch, int64_t begin, int64_t end) {
  visit_elements(a.sizes, [&]<class T, class E>() {
    Convolution<T, E> convolve(a, scratch);
    for (int64_t item = begin; item < end; ++item) convolve(item);
  });
}

}  // namespace fusedtrain::cpu
