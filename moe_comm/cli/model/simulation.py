"""A discrete-event simulation of one dispatch or combine over the links of a cluster.

Servers, each first come first served: the NIC of every rank, out and in; NVLink of every rank, out
and in; its device memory. A rank cuts what it sends to a node into chunks and visits the nodes in
turn, beginning behind its own. A chunk occupies the sender's NIC and that of the rank of equal local
index for its whole length, so a receiver that is busy holds its senders back. On arrival it is
fanned out over NVLink. Every byte passes the device memory it is read from or written to.
"""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np

from moe_comm.cli.model.cluster import Cluster
from moe_comm.cli.model.drawn_routing import Floats, Traffic
from moe_comm.cli.model.workload import Workload

BYTES_PER_US = 1e3  # of a link of 1 GB/s


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedOperation:
    """Result of a simulation.

    Args:
        time_us: Time until the last rank has all its rows, the exchange of count rows included.
        rows_us: Part of it for the exchange of count rows.
        median_rank_us: Time by which half of the ranks had theirs.
        nic_bytes: Bytes out of the rank that sends most to other nodes.
        nvlink_bytes: Bytes out of the rank that sends most over NVLink.
        nic_busy: Part of the time that the busiest NIC, out or in, was in use.
        nvlink_busy: Part of the time that the busiest NVLink was in use.
        memory_busy: Part of the time that the busiest device memory was in use.
        num_events: Chunks that were moved.
    """

    time_us: float
    rows_us: float
    median_rank_us: float
    nic_bytes: float
    nvlink_bytes: float
    nic_busy: float
    nvlink_busy: float
    memory_busy: float
    num_events: int


class _Servers:
    """When every server of one kind is free again, and how long it has worked."""

    def __init__(self, count: int, gbs: float) -> None:
        self.free_us = np.zeros(count)
        self.busy_us = np.zeros(count)
        self.bytes_per_us = gbs * BYTES_PER_US

    def serve(self, server: int, ready_us: float, num_bytes: float) -> float:
        """Occupies `server` from `ready_us` or when it is free; returns the end."""
        work_us = num_bytes / self.bytes_per_us
        end_us = max(ready_us, float(self.free_us[server])) + work_us
        self.free_us[server] = end_us
        self.busy_us[server] += work_us
        return end_us

    def serve_all(self, servers: slice, ready_us: float, num_bytes: Floats) -> Floats:
        """The same for adjacent servers at once."""
        work_us = num_bytes / self.bytes_per_us
        end_us = np.maximum(ready_us, self.free_us[servers]) + work_us
        self.free_us[servers] = end_us
        self.busy_us[servers] += work_us
        return np.asarray(end_us)


def simulate(
    traffic: Traffic,
    workload: Workload,
    cluster: Cluster,
    *,
    is_combine: bool = False,
    num_chunks: int = 4,
    count_row_bytes: int = 0,
) -> SimulatedOperation:
    """One operation of all ranks.

    A combine is simulated as the dispatch that brought its rows, run backwards: the same bytes in the
    other direction, so that what was received is sent.

    Args:
        traffic: Rows from tokens to experts, drawn for this operation's `Movement`.
        workload: Bytes of a row.
        cluster: Links.
        is_combine: Combine instead of dispatch.
        num_chunks: Pieces into which what a rank sends to a node is cut, >= 1.
        count_row_bytes: Bytes of count rows that arrive at every rank before rows move.
    """
    if num_chunks < 1:
        raise ValueError(f"num_chunks must be >= 1, got {num_chunks}")
    return _Simulation(traffic, workload, cluster, is_combine, num_chunks, count_row_bytes).run()


class _Simulation:
    def __init__(
        self,
        traffic: Traffic,
        workload: Workload,
        cluster: Cluster,
        is_combine: bool,
        num_chunks: int,
        count_row_bytes: int,
    ) -> None:
        self.cluster = cluster
        self.num_chunks = num_chunks
        num_ranks = cluster.num_ranks
        movement = workload.combine if is_combine else workload.dispatch
        self.row_bytes = workload.hidden * movement.element_bytes
        written: Floats
        if is_combine:
            # Node n owes its rows to the ranks they came from; ranks of equal local index talk.
            self.to_rank = traffic.to_rank.T
            self.to_node = self._reversed_to_node(traffic)
            read = traffic.to_slots * self.row_bytes
            written = np.full(num_ranks, workload.num_tokens * self.row_bytes)
        else:
            self.to_rank = traffic.to_rank
            self.to_node = traffic.to_node
            read = np.full(num_ranks, workload.num_tokens * workload.hidden * workload.source_bytes)
            written = traffic.to_slots * self.row_bytes
            # Slots without a row of their own are copies; a rank writes each of its own slots itself.
            local = cluster.num_local_ranks
            num_copies = (traffic.to_slots - traffic.to_rank.sum(axis=0)) * (local - 1) / local
            read = read + num_copies * self.row_bytes
        self.memory_bytes = read + written
        machine = cluster.machine
        self.nic_out = _Servers(num_ranks, machine.nic_gbs)
        self.nic_in = _Servers(num_ranks, machine.nic_gbs)
        self.nvlink_out = _Servers(num_ranks, machine.nvlink_gbs)
        self.nvlink_in = _Servers(num_ranks, machine.nvlink_gbs)
        self.rows_us = self._rows_us(count_row_bytes)
        self.done_us = np.full(num_ranks, self.rows_us)
        self.nic_bytes = np.zeros(num_ranks)
        self.nvlink_bytes = np.zeros(num_ranks)
        self.num_events = 0

    def _reversed_to_node(self, traffic: Traffic) -> Floats:
        """Return the traffic back from the rank of equal local index on each node: what it had fanned out."""
        local = self.cluster.num_local_ranks
        nodes = self.cluster.num_nodes
        back = np.zeros_like(traffic.to_node)
        for source in range(self.cluster.num_ranks):
            node, local_idx = divmod(source, local)
            for other in range(nodes):
                if other != node:
                    back[other * local + local_idx, node] = traffic.to_node[source, other]
        for rank_idx in range(self.cluster.num_ranks):
            back[rank_idx, rank_idx // local] = traffic.to_node[rank_idx, rank_idx // local]
        return back

    def _rows_us(self, count_row_bytes: int) -> float:
        """Count rows in two levels: within the node and between nodes, all ranks at the same time."""
        cluster, machine = self.cluster, self.cluster.machine
        per_rank = count_row_bytes / cluster.num_ranks
        time_us = machine.launch_us
        if cluster.num_nodes > 1:
            between = per_rank * (cluster.num_nodes - 1)
            time_us += machine.nic_latency_us + between / (machine.nic_gbs * BYTES_PER_US)
        if cluster.num_local_ranks > 1:
            within = per_rank * cluster.num_nodes * (cluster.num_local_ranks - 1)
            time_us += machine.nvlink_latency_us + within / (machine.nvlink_gbs * BYTES_PER_US)
        return time_us

    def run(self) -> SimulatedOperation:
        """Events in order of time: chunks over NICs, then their fan-out."""
        self._send_within_nodes()
        # (time, order, rank, position): a sender that looks for its next chunk to send, or
        # (time, order, rank, -1 - node): a chunk of `rank` that has arrived at `node`.
        events: list[tuple[float, int, int, int]] = []
        num_positions = (self.cluster.num_nodes - 1) * self.num_chunks
        order = 0
        if num_positions > 0:
            for rank_idx in range(self.cluster.num_ranks):
                events.append((self.rows_us, order, rank_idx, 0))
                order += 1
        while events:
            time_us, _, rank_idx, position = heapq.heappop(events)
            order += 1
            if position < 0:
                self._fan_out(rank_idx, -1 - position, time_us)
                continue
            node = self._node_at(rank_idx, position)
            target = node * self.cluster.num_local_ranks + rank_idx % self.cluster.num_local_ranks
            ready_us = max(
                time_us, float(self.nic_out.free_us[rank_idx]), float(self.nic_in.free_us[target])
            )
            if ready_us > time_us:
                heapq.heappush(events, (ready_us, order, rank_idx, position))
                continue
            num_bytes = float(self.to_node[rank_idx, node]) * self.row_bytes / self.num_chunks
            end_us = self.nic_out.serve(rank_idx, ready_us, num_bytes)
            self.nic_in.serve(target, ready_us, num_bytes)
            self.nic_bytes[rank_idx] += num_bytes
            arrival_us = end_us + self.cluster.machine.nic_latency_us
            heapq.heappush(events, (arrival_us, order, rank_idx, -1 - node))
            if position + 1 < num_positions:
                order += 1
                heapq.heappush(events, (end_us, order, rank_idx, position + 1))
        return self._outcome()

    def _node_at(self, rank_idx: int, position: int) -> int:
        """Nodes in turn, chunk after chunk, beginning behind the rank's own."""
        nodes = self.cluster.num_nodes
        own = rank_idx // self.cluster.num_local_ranks
        return (own + 1 + position % (nodes - 1)) % nodes

    def _send_within_nodes(self) -> None:
        for rank_idx in range(self.cluster.num_ranks):
            node, local_idx = divmod(rank_idx, self.cluster.num_local_ranks)
            self._deliver(rank_idx, node, rank_idx, local_idx, self.rows_us, 1.0)

    def _fan_out(self, source: int, node: int, time_us: float) -> None:
        local_idx = source % self.cluster.num_local_ranks
        forwarder = node * self.cluster.num_local_ranks + local_idx
        self._deliver(source, node, forwarder, local_idx, time_us, 1.0 / self.num_chunks)

    def _deliver(
        self, source: int, node: int, forwarder: int, local_idx: int, time_us: float, part: float
    ) -> None:
        """Rows of `source` for the ranks of `node`, from `forwarder` over NVLink."""
        self.num_events += 1
        local = self.cluster.num_local_ranks
        peers = slice(node * local, (node + 1) * local)
        num_bytes = np.array(self.to_rank[source, peers]) * self.row_bytes * part
        stays = float(num_bytes[local_idx])
        num_bytes[local_idx] = 0.0
        if stays > 0.0:
            self.done_us[forwarder] = max(float(self.done_us[forwarder]), time_us)
        total = float(num_bytes.sum())
        if total == 0.0:
            return
        start_us = max(time_us, float(self.nvlink_out.free_us[forwarder]))
        sent_us = self.nvlink_out.serve(forwarder, time_us, total)
        self.nvlink_bytes[forwarder] += total
        received_us = self.nvlink_in.serve_all(peers, start_us, num_bytes)
        end_us = np.maximum(received_us, sent_us) + self.cluster.machine.nvlink_latency_us
        done = self.done_us[peers]
        self.done_us[peers] = np.where(num_bytes > 0.0, np.maximum(done, end_us), done)

    def _outcome(self) -> SimulatedOperation:
        # Memory works all along: it bounds a rank from below, from the moment rows may move.
        memory_us = self.memory_bytes / (self.cluster.machine.hbm_gbs * BYTES_PER_US)
        done_us = np.maximum(self.done_us, self.rows_us + memory_us)
        time_us = float(done_us.max())

        def busy(*servers: _Servers) -> float:
            return max(float(one.busy_us.max()) for one in servers) / time_us

        return SimulatedOperation(
            time_us=time_us,
            rows_us=self.rows_us,
            median_rank_us=float(np.median(done_us)),
            nic_bytes=float(self.nic_bytes.max()),
            nvlink_bytes=float(self.nvlink_bytes.max()),
            nic_busy=busy(self.nic_out, self.nic_in),
            nvlink_busy=busy(self.nvlink_out, self.nvlink_in),
            memory_busy=float(memory_us.max()) / time_us,
            num_events=self.num_events,
        )
