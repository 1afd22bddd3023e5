import sys

from fusedtrain.cli import main

sys.exit(main())
