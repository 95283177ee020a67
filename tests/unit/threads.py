"""Running one function in several threads at once, failures included."""

from __future__ import annotations

import threading
from collections.abc import Callable


def run_in_threads(count: int, work: Callable[[int], None]) -> None:
    """Call ``work(0)`` to ``work(count - 1)``, each in a thread, and raise the first exception of any of them."""
    failures: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            work(i)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
