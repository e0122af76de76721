"""The clock of a simulation: what is due next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from heapq import heappop, heappush


class Task(ABC):
    """Something that comes due. What puts it off counts `version` up, so that the entry made before no longer holds."""

    __slots__ = ("version",)
    version: int

    @abstractmethod
    def due(self) -> None:
        """Its time has come."""


class Clock:
    """Tasks by the time they are due; those due at one time in the order in which they were entered."""

    __slots__ = ("_entered", "_heap", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Task, int]] = []
        self._entered = 0

    def at(self, time_s: float, task: Task) -> None:
        """Enters a task."""
        self._entered += 1
        heappush(self._heap, (time_s, self._entered, task, task.version))

    def again(self, time_s: float, task: Task) -> None:
        """Enters a task at another time than before."""
        task.version += 1
        self.at(time_s, task)

    def run_now(self) -> bool:
        """Runs one task that is due now; False if none is."""
        heap = self._heap
        while heap and heap[0][0] <= self.now:
            _, _, task, version = heappop(heap)
            if version == task.version:
                task.due()
                return True
        return False

    def go_on(self) -> bool:
        """Turns to the time when the next task is due; False if there is none."""
        heap = self._heap
        while heap and heap[0][3] != heap[0][2].version:
            heappop(heap)
        if heap:
            self.now = heap[0][0]
        return bool(heap)
