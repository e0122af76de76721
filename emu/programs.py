"""What the command line does with a user's program: finds it, shows what it returned, and says how it failed."""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

DONE, FALSE, BAD, INTERRUPTED = 0, 1, 2, 130  # exit codes
SMALL = 16  # elements: smaller tensors are shown with their numbers, larger ones by dtype and shape


class Failure(NamedTuple):
    """What went wrong, what to do about it, and how the command exits."""

    error: str
    hint: str
    code: int = BAD


def load(text: str) -> Callable[..., Any]:
    """The function that FILE.py:FUNC names.

    Raises:
        EmuError: no such file or function, or a file that fails to import.
    """
    return load_all(text)[0]


def load_all(*texts: str) -> list[Callable[..., Any]]:
    """The functions that several FILE.py:FUNC name. A file is imported once, so that what it draws is the same for all.

    Raises:
        EmuError: as load.
    """
    from emu.spmd import EmuError

    modules: dict[Path, ModuleType] = {}
    functions = []
    for text in texts:
        file, name = locate(text)
        path = Path(file).resolve()
        module = modules[path] = modules.get(path) or _imported(Path(file), file)
        function = getattr(module, name, None)
        if not callable(function):
            own = [k for k, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
            there = ", ".join(k for k in own if not k.startswith("_")) or "none"
            raise EmuError(f"{file} has no function {name!r}", f"its functions are {there}")
        functions.append(function)
    return functions


def locate(text: str) -> tuple[str, str]:
    """The file and the name in FILE.py:FUNC; nothing is imported.

    Raises:
        EmuError: not of this form, or no such file.
    """
    from emu.spmd import EmuError

    file, colon, name = text.rpartition(":")
    if not colon or not file or not name:
        raise EmuError(f"{text!r} does not name a function", "write FILE.py:FUNC")
    if not Path(file).is_file():
        raise EmuError(f"there is no file {file!r}", "give the path of a Python file that exists")
    return file, name


def _imported(path: Path, file: str) -> ModuleType:
    from emu.spmd import EmuError

    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise EmuError(f"{file!r} is not a Python file", "give a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        hint = "mend the file, and try again"
        if isinstance(error, SystemExit):
            hint = 'put what starts the program under if __name__ == "__main__":'
        raise EmuError(f"{file} fails to import: {type(error).__name__}: {error}", hint) from error
    finally:
        sys.path.pop(0)
    return module


def plain(result: Any) -> Any:
    """A result as JSON: small tensors as lists, large ones as dtype[shape]; no NaN, which JSON does not have."""
    import torch

    if isinstance(result, torch.Tensor):
        small = result.numel() <= SMALL and not result.is_meta
        name = str(result.dtype).removeprefix("torch.")
        return plain(result.tolist()) if small else f"{name}{list(result.shape)}"
    if isinstance(result, dict):
        return {str(k): plain(v) for k, v in result.items()}
    if isinstance(result, (list, tuple)):
        return [plain(v) for v in result]
    if isinstance(result, float) and not math.isfinite(result):
        return str(result)
    return result if isinstance(result, (int, float, str, bool, type(None))) else repr(result)


def failure_of(error: BaseException) -> Failure:
    """An error as the command reports it: emu's own words and hint, or the user's exception and its line."""
    code = FALSE if _out_of_memory(error) else BAD
    told: Any = error
    if hasattr(error, "format_message"):  # the command line itself is wrong
        return Failure(told.format_message(), "see emu --help")
    if hasattr(error, "hint"):
        hint = str(told.hint)
        before = str(error).partition(hint)[0] if hint else str(error)  # what leads to the hint stays out, too
        before = before.removesuffix("hint: ").removesuffix("What to do: ").strip()
        # What is wrong in a file is told with the file and the line, which stand before the message.
        return Failure(before if getattr(error, "file", None) else getattr(error, "message", before), hint, code)
    line = _line_of(error)
    what = f"{type(error).__name__}: {error}" + (f" ({line})" if line else "")
    if code == FALSE:
        return Failure(what, "make the model or the batch smaller, or spread it over more devices", code)
    if isinstance(error, SystemExit):
        return Failure(f"the program ended itself: {what}", "return from the function instead of calling sys.exit")
    if not line:
        return Failure(what, "no line of the program has a part in this: it may be a mistake of emu's own")
    return Failure(what, "the program raised this: mend it at that line")


def _line_of(error: BaseException) -> str:
    """The user's line that an error came from, e.g. "file.py:12", or "": not emu's, torch's or Python's own."""
    import torch

    others = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in (__file__, torch.__file__, os.__file__))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*others, "<frozen")) and "-packages" + os.sep not in frame.filename:
            return f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return ""


def _out_of_memory(error: BaseException) -> bool:
    import torch

    # The CPU allocator has no error type of its own.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
