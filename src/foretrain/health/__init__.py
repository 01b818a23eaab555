"""Is the run well? Each module has one of five tasks.

detect          `detect` judges every step by what is usual (`baseline`), `vitals` judges many steps at once. Both
                know the same signs and limits (`signs`) and change nothing.
act             `act` decides what is done in an emergency: roll back, lower the rate, skip, give up;
                `Hybrid.carry_out` does it.
advise          `advise` reports what ails a run and `findings` says in words, with settings that would help.
                Nothing is changed unless `guard.auto_tune` is on. `checkup` decides when, and emits the events.
layers          `layers` measures norms per layer on the device.
memory errors   `shortage` explains that memory ran out; `rescue` undoes the step and repeats it in less memory.
"""
