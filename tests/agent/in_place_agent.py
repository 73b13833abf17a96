"""The real agent with one verb, ``in_place``: reclaim an image in place, without the arguments of other methods."""

import sys
from typing import Any

from storage_admin.agent import main
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import Request
from storage_admin.agent.rewrite.chain import Chain, Planned
from storage_admin.agent.verbs import reclaim


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """``args``: ``image`` and ``chain`` (links as the plan knows them), ``bandwidth``."""
    chain = Chain(Planned.parse(request.args["image"]), [Planned.parse(link) for link in request.args["chain"]])
    try:
        return reclaim.dig(io, chain, children_known=True, bandwidth=request.args["bandwidth"], idle_io=False)
    finally:
        chain.close()


if __name__ == "__main__":
    main.VERBS["in_place"] = ("in_place", "run")
    main.load = lambda verb: run
    sys.exit(main.main())
