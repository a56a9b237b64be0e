"""The runner: runs the user's program inside a worker and says why it ended.

The program sees what `python script.py` would give it. What it raises is printed
as Python prints it, and goes to the agent with file and line; no decorator is
needed. Its exit code is its own. The same code runs in a forked worker and, as
`python -m elastic_core.agent.runner`, in a spawned one.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import signal
import site
import sys
import sysconfig
import time
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Final

from elastic_core.agent.process import Entrypoint, Launch, become_worker, read_launch
from elastic_core.channel import AgentLink, LinkLost
from elastic_core.exits import exit_code_of
from elastic_core.ids import NodeId
from elastic_core.model.failure import Failure, bound
from elastic_core.model.messages import WorkerFailed

ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
"""torch's variable: where a worker writes why it failed, as JSON."""

_NOT_FOUND: Final = 127
_NOT_EXECUTABLE: Final = 126
"""As shells have it."""

_MAX_MESSAGE: Final = 2_000
_BROKEN_COLLECTIVE: Final = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
"""Words of RuntimeErrors by which gloo says that a peer has gone: it has no type of its own for them."""


def run(launch: Launch) -> int:
    """Run the launch's program in this process and return the exit code to end with."""
    error_file = _fresh_error_file()
    try:
        _run_program(launch.entrypoint, launch.args)
    except BaseException as error:
        error.__traceback__ = _user_part(error.__traceback__)
        code = _code_of(error, launch.entrypoint)
        failure = _describe(error, code)
        is_left = not launch.log and _is_alike_on_all_ranks(error, failure)
        if not is_left and not isinstance(error, SystemExit):
            _print(error)
        if code and not _report(failure, error_file, printed=not is_left) and is_left:
            _print(error)
        if isinstance(error, KeyboardInterrupt):
            _end_by(signal.SIGINT)
        return code
    return 0


def find_modules_of(entrypoint: Entrypoint) -> None:
    """Let imports find the modules that lie beside the program, as Python does for it."""
    if entrypoint.kind == "script":
        target = os.path.realpath(entrypoint.target)
        sys.path[0] = target if Path(target).is_dir() else os.path.dirname(target)  # noqa: PTH120


def main() -> None:
    """Become the worker whose launch lies in the descriptor argv[1], a child of process argv[2]."""
    launch = read_launch(int(sys.argv[1]))
    become_worker(launch, int(sys.argv[2]))
    find_modules_of(launch.entrypoint)
    sys.exit(run(launch))


def _run_program(entrypoint: Entrypoint, args: tuple[str, ...]) -> None:
    target = entrypoint.target
    sys.argv = [target, *args]
    if entrypoint.kind == "command":
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, but not by other programs
            signal.signal(number, signal.SIG_DFL)
        os.execvp(target, sys.argv)  # noqa: S606 (a program and its arguments, no shell)
    sys.orig_argv = [sys.executable, *(["-m"] if entrypoint.kind == "module" else []), *sys.argv]
    if entrypoint.kind == "module":
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    elif Path(target).is_dir() or target.endswith((".zip", ".pyz", ".pyc")):
        runpy.run_path(target, run_name="__main__")
    else:
        _run_script(target)


def _run_script(target: str) -> None:
    """Run a source file as `__main__`, which unlike `runpy.run_path` stays `__main__` until the end.

    Threads, exit handlers and what they pickle still need it when the last line has run.
    """
    path = os.path.abspath(target)  # noqa: PTH100 (resolves no links: as Python's own `__file__`)
    loader = SourceFileLoader("__main__", path)
    code = loader.source_to_code(loader.get_data(path), path)
    module = ModuleType("__main__")
    vars(module).update(
        {"__file__": path, "__cached__": None, "__loader__": loader, "__builtins__": __builtins__}
    )
    sys.modules["__main__"] = module
    if "__mp_main__" in sys.modules:  # what multiprocessing calls it in a child, and finds in its parent
        sys.modules["__mp_main__"] = module
    exec(code, vars(module))  # noqa: S102 (running the user's program is what a runner is for)


def _code_of(error: BaseException, entrypoint: Entrypoint) -> int:
    """Return the status that Python, or a shell in case of a command, ends with."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)  # noqa: T201 (as Python does)
        return 1
    if isinstance(error, KeyboardInterrupt):
        return exit_code_of(-signal.SIGINT)
    if entrypoint.kind == "command" and isinstance(error, OSError):
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
    return 1


def _end_by(number: signal.Signals) -> None:
    """End as an interrupted Python does: exit handlers first, then by the signal, so that callers see it."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _print(error: BaseException) -> None:
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:
        traceback.print_exception(error)


# ---- what is told ----------------------------------------------------------------------------


def _is_alike_on_all_ranks(error: BaseException, failure: Failure) -> bool:
    """Tell whether each rank would print the same on a shared console: a bug before any group was formed.

    The agent of the run's root cause prints it then. A hook of the program's own prints as it likes.
    """
    is_plain = isinstance(error, Exception) and sys.excepthook is sys.__excepthook__
    return is_plain and not failure.started and not failure.consequence


def _report(failure: Failure, error_file: Path | None, *, printed: bool) -> bool:
    """Tell torch's error file and the agent; return whether the agent took it."""
    _write_error_file(error_file, failure)
    # Without an agent, the output has to do.
    with contextlib.suppress(LinkLost, ValueError), AgentLink.connect() as link:
        link.send(WorkerFailed(failure=failure, printed=printed))
        return True
    return False


def _describe(error: BaseException, code: int) -> Failure:
    environment = os.environ
    trace = "".join(traceback.format_exception(error))
    return Failure(
        node_id=NodeId(environment.get("ELASTIC_NODE_ID", "")),
        generation=0,  # the agent knows: a worker of the elastic API outlives generations
        rank=_number(environment.get("RANK")),
        local_rank=_number(environment.get("LOCAL_RANK")),
        exit_code=code,
        message=_first_characters(traceback.format_exception_only(error)[-1].strip() or type(error).__name__),
        location=_location(error),
        traceback=bound(trace),
        started=_had_process_group(),
        consequence=_is_broken_collective(error),
        wall_time=time.time(),
    )


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else -1


def _first_characters(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}[{len(text) - _MAX_MESSAGE} cut]"


def _user_part(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the outer frames, which are ours and those of the machinery."""
    while trace is not None and (
        trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__)
        or trace.tb_frame.f_code.co_filename.startswith("<frozen ")
    ):
        trace = trace.tb_next
    return trace


def _location(error: BaseException) -> str:
    """Return "file:line" of the innermost frame of the user's code, or of any code if none is theirs."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(error.filename)}:{error.lineno}"
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    users = [frame for frame in frames if not frame[0].startswith(_foreign())]
    for name, line in reversed(users or frames):
        return f"{_shown(name)}:{line}"
    return ""


def _foreign() -> tuple[str, ...]:
    """Return what the names of files start with that the user did not write."""
    paths = sysconfig.get_paths()
    libraries = {paths["stdlib"], paths["purelib"], paths["platlib"], site.getusersitepackages()}
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    return ("<frozen ", *(f"{path}{os.sep}" for path in sorted({*libraries, own})))


def _shown(name: str) -> str:
    with contextlib.suppress(ValueError, OSError):
        return str(Path(name).relative_to(Path.cwd()))
    return name


def _had_process_group() -> bool:
    """Tell whether this process was ever part of a process group, also if it has left it.

    torch puts its own `sys.excepthook` in place when a default group is formed and leaves it there,
    so that it still tells after a `finally: destroy_process_group()`.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return False
    hook_of_torch = getattr(sys.excepthook, "__module__", "") == "torch.distributed.distributed_c10d"
    return hook_of_torch or bool(distributed.is_initialized())


def _is_broken_collective(error: BaseException | None) -> bool:
    """Tell whether a peer's end explains the error, or that which it was raised from.

    Also true while a group is being formed: a peer that never came is no fault of this worker.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None:
        return False
    names = ("DistBackendError", "DistNetworkError", "DistStoreError")
    types = tuple(getattr(distributed, name) for name in names if hasattr(distributed, name))
    while error is not None:
        if isinstance(error, types):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _BROKEN_COLLECTIVE):
            return True
        error = error.__cause__
    return False


# ---- torch's error file ----------------------------------------------------------------------


def _fresh_error_file() -> Path | None:
    """Return the path that torch's protocol names, with nothing of an earlier worker in it."""
    name = os.environ.get(ERROR_FILE, "")
    if not name:
        return None
    path = Path(name)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    return path


def _write_error_file(path: Path | None, failure: Failure) -> None:
    """Write the failure as torch's `@record` does, unless the program did so itself."""
    if path is None or path.exists():
        return
    extra = {"py_callstack": failure.traceback, "timestamp": str(int(failure.wall_time))}
    content = {"message": {"message": failure.message, "extraInfo": extra}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    except OSError as error:
        print(f"cannot write {ERROR_FILE} {path}: {error.strerror}", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main()
