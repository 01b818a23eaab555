"""`foretrain` for others to start: hands the command to the server of warm.py, and ends as the command does.

It imports nothing but what the interpreter has loaded or linked, as it is started some nine hundred times.
"""

import sys
from _socket import AF_UNIX, SCM_RIGHTS, SOL_SOCKET, socket
from posix import environ, getcwdb  # type: ignore[attr-defined]

address, *arguments = sys.argv[1:]
chaos = [name + b"=" + value for name, value in environ.items() if name.startswith(b"CKPT_CHAOS_")]
order = [getcwdb(), str(len(chaos)).encode(), *chaos, *(argument.encode() for argument in arguments)]
outputs = (2).to_bytes(4, sys.byteorder) * 2
connection = socket(AF_UNIX)
connection.connect(address)
connection.sendmsg([b"\0".join(order)], [(SOL_SOCKET, SCM_RIGHTS, outputs)])
sys.exit(int(connection.recv(16) or b"1"))
