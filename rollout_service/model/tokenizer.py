"""Load the tokenizer of a model folder, in any format of transformers."""

import logging
import textwrap
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rollout_service.model.hub import VOCABULARIES

logger = logging.getLogger(__name__)
_ALONE = "tokenizer.json"
"""File that transformers can always load unless it is damaged."""


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer in ``folder``. None: it has none, or (with a warning) none that transformers can load.

    Raises ValueError for a tokenizer.json that cannot be loaded.
    """
    files = vocabulary_files(folder)
    if not files:
        logger.info(
            "%s holds no tokenizer (%s): text prompts and stop strings are refused", folder, ", ".join(VOCABULARIES)
        )
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever a tokenizer's own code and the packages below it raise
        why = (
            f"{folder}: transformers cannot load the tokenizer of {', '.join(files)}: "
            f"{textwrap.shorten(str(error), 300, placeholder=' …')}"
        )
        if _ALONE in files:
            raise ValueError(f"{why}; copy or download these files again") from error
        logger.warning("%s; text prompts and stop strings are refused: convert it to tokenizer.json", why)
        return None
    return tokenizer


def vocabulary_files(folder: Path) -> list[str]:
    """Return the names of the tokenizer's files in ``folder``, sorted; empty: it has none."""
    return sorted({path.name for pattern in VOCABULARIES for path in folder.glob(pattern) if path.is_file()})
