"""Lets the tests of this room import the tokenizer folders beside them."""

from __future__ import annotations

import sys
from pathlib import Path

from trimaran.comm.tokenizers.convert import patch_sentencepiece

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
# The AutoTokenizer that results are compared with needs the same help, if any.
patch_sentencepiece()
