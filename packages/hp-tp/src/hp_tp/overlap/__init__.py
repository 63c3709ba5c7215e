"""Products that run beside the communication of their operands or results.

Read in this order: :mod:`policy` (when), :mod:`side_stream` (where communication runs), :mod:`matrices` (what is multiplied),
:mod:`copies` (peer memory), :mod:`gathered` and :mod:`scattered` (how), :mod:`functions` (with gradients).

[Note: which pieces] GPUs of one machine move rows by their copy engines, which takes no processor from a product: a rank multiplies its
own rows while the others' are pulled into their places; and it multiplies the others' rows first, which are pushed while its own are
multiplied, last. That is as few products as can be (two of two ranks), and each has long rows.

Elsewhere rows travel by collectives, of which three ways to cut were weighed.

* One collective per chunk of the sequence. For a reduction it is right: a chunk is some rows of every rank's piece, each
  rank's result is filled from the front, and nothing is copied. For a gather it is not: what arrives is in the order of
  chunks, and the weight gradient needs the gathered rows in the order of the sequence, so all of them, or the result, would be
  copied once more.
* A ring of sends, each rank multiplying the piece that it has while the next one arrives. Pieces land where they belong and a
  product per piece can start early; but it takes as many launches as there are ranks, each slower than its share of an
  all-gather. It is here as ``gather_by="sends"``.
* One all-gather of everything, beside the product of the rows that lie here already, and then the product of the others.
  It costs what the plain all-gather costs and one launch more per operand, and hides as much as one rank's share of the product
  takes: for wide products (the feed-forward's) all of the communication. This is the default.

In backward nothing needs to be cut, where a weight gradient is wanted: it is a product that waits for nobody, so the one
reduction of the input's gradient runs beside it.

[Note: the gathered rows are kept] The gradient of a weight needs the whole input. It is kept from forward to backward, as the plain
program keeps it, so both move the same bytes; to gather again would move half as much again and save one rank's
activations. Who needs the memory recomputes the block, and gathers again by that.
"""

from hp_tp.overlap.functions import all_gather_matmul as all_gather_matmul
from hp_tp.overlap.functions import matmul_reduce_scatter as matmul_reduce_scatter
from hp_tp.overlap.policy import OverlapPolicy as OverlapPolicy

__all__ = ["OverlapPolicy", "all_gather_matmul", "matmul_reduce_scatter"]
