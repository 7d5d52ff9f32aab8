"""An example's files import one another as scripts do; without the packages that it needs there is nothing to test."""

import asyncio
import inspect
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples" / "serve"))
there = all(find_spec(package) for package in ("fastapi", "uvicorn", "httpx", "python_multipart"))
collect_ignore = [] if there else ["test_serve.py"]


def pytest_report_header() -> list[str]:
    return ["tests of examples/serve are left out: it needs broadsight[serve]"] if collect_ignore else []


def pytest_pyfunc_call(pyfuncitem) -> bool | None:
    """Run tests that are coroutines."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True
