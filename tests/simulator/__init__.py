"""Random programs, crashes and orders of completion through the pure core: `python -m tests.simulator --seeds 10000`.

| file | holds |
|---|---|
| `programs.py` | a random workflow, and the interpreter that runs it with plain asyncio |
| `bodies.py` | the functions it calls as steps, and the world that counts their calls |
| `database.py` | the statements of `postgres/`, one at a time, on plain rows |
| `simulation.py` | two workers, what can go wrong with them, and a seed that decides |
| `invariants.py` | what must hold of a finished run |
"""
