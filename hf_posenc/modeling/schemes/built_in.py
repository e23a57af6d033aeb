"""The schemes of this package. A checkpoint has a shorter list here, of those that it needs."""

from .absolute import Absolute, NoPositions
from .alibi import Alibi
from .cable import Cable
from .deberta import Deberta
from .fire import Fire
from .kerple import Kerple
from .relative import Relative, RelativeKey, RelativeKeyQuery
from .rotary import Rope
from .sinusoidal import Sinusoidal
from .t5 import T5
from .transformer_xl import TransformerXL
from .tupe import Tupe


BUILT_IN = (
    Absolute,
    Sinusoidal,
    NoPositions,
    Relative,
    RelativeKey,
    RelativeKeyQuery,
    TransformerXL,
    T5,
    Tupe,
    Deberta,
    Rope,
    Alibi,
    Kerple,
    Fire,
    Cable,
)
# Where a scheme may come from that is not among them.
OTHERS = (
    "a custom scheme has to be registered first, by hf_posenc.register_scheme or, on the command line, --scheme-file"
)
