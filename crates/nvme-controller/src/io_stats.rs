//! I/O statistics of a subsystem: the commands of each host, queue and namespace.
//!
//! ```text
//!   IoStatsTable ◀── IoStatsSource ◀── RegisteredCounters, one for each namespace of a queue
//!    of a subsystem    of a controller    written by the thread of the queue
//! ```
//!
//! When a queue is closed, its counts are added to those of its host and namespace that are kept. Nothing
//! here is on the path of an I/O: counting is that of [`IoCounters`], and the lock is for registration
//! and for readers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{IoCounters, IoStats, Span};

use crate::controller::transport_interface::IoTotals;

/// Statistics of a subsystem.
#[derive(Debug, Default)]
pub struct IoStatsTable {
    state: Mutex<TableState>,
}

/// Statistics of one controller: a part of those of its subsystem.
#[derive(Clone, Debug)]
pub struct IoStatsSource {
    table: Arc<IoStatsTable>,
    host: Arc<str>,
    cntlid: u16,
    /// Sum of the closed queues of the controller.
    closed: Arc<Mutex<IoStats>>,
}

/// Statistics of one queue.
#[derive(Clone, Debug)]
pub struct QueueIoStats {
    /// Those of its controller.
    pub controller: IoStatsSource,
    /// Queue identifier.
    pub qid: u16,
}

/// Statistics of a queue and a namespace, or of the closed queues of a host and a namespace.
#[derive(Clone, Debug)]
pub struct IoStatsSample {
    /// NQN of the host. Empty for hosts without one, and for the closed queues of hosts beyond a limit.
    pub host: Arc<str>,
    /// Controller and queue identifier; `None` for queues that are closed.
    pub queue: Option<(u16, u16)>,
    /// Namespace identifier.
    pub nsid: u32,
    /// Statistics since the queue was created.
    pub stats: IoStats,
}

#[derive(Debug, Default)]
struct TableState {
    open: BTreeMap<u64, OpenCounters>,
    closed: BTreeMap<(Arc<str>, u32), Arc<IoStats>>,
    next_id: u64,
}

#[derive(Clone, Debug)]
struct OpenCounters {
    host: Arc<str>,
    queue: (u16, u16),
    nsid: u32,
    counters: Arc<IoCounters>,
    /// Where the counts are added when the queue is closed.
    controller: Arc<Mutex<IoStats>>,
}

/// Counters in a table, until they are dropped.
#[derive(Debug)]
pub(crate) struct RegisteredCounters {
    counters: Arc<IoCounters>,
    table: Arc<IoStatsTable>,
    id: u64,
}

/// Number of hosts and namespaces whose closed queues are kept apart.
const CLOSED_MAX: usize = 512;

impl IoStatsTable {
    /// Statistics for the controller `cntlid` of a host.
    pub fn source(self: &Arc<Self>, host: &str, cntlid: u16) -> IoStatsSource {
        IoStatsSource { table: Arc::clone(self), host: host.into(), cntlid, closed: Arc::default() }
    }

    /// Statistics of every open queue and namespace, and of every host and namespace with closed queues.
    /// Their sum counts every command once.
    pub fn samples(&self) -> Vec<IoStatsSample> {
        let state = self.lock();
        let open: Vec<OpenCounters> = state.open.values().cloned().collect();
        let closed = state.closed.clone();
        // Copying the numbers takes longer than a thread with queues to register should wait.
        drop(state);
        let open = open.into_iter().map(|OpenCounters { host, queue, nsid, counters, .. }| {
            IoStatsSample { host, queue: Some(queue), nsid, stats: snapshot(&counters) }
        });
        let closed = closed.into_iter().map(|((host, nsid), stats)| {
            let stats = Arc::unwrap_or_clone(stats);
            IoStatsSample { host, queue: None, nsid, stats }
        });
        open.chain(closed).collect()
    }

    fn lock(&self) -> MutexGuard<'_, TableState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self, id: u64) {
        let mut state = self.lock();
        let Some(removed) = state.open.remove(&id) else { return };
        let OpenCounters { host, nsid, counters, controller, .. } = removed;
        let stats = snapshot(&counters);
        if stats.is_empty() {
            return;
        }
        controller.lock().unwrap_or_else(PoisonError::into_inner).merge(&stats);
        let is_known = state.closed.contains_key(&(Arc::clone(&host), nsid));
        let host = if is_known || state.closed.len() < CLOSED_MAX { host } else { "".into() };
        let kept = state.closed.entry((host, nsid)).or_default();
        Arc::make_mut(kept).merge(&stats);
    }
}

impl IoStatsSource {
    /// Totals of all queues of the controller, open and closed.
    pub(crate) fn totals(&self) -> IoTotals {
        let state = self.table.lock();
        let open = state.open.values().filter(|open| Arc::ptr_eq(&open.controller, &self.closed));
        let mut sum = IoTotals::of_stats(&self.closed_queues());
        // Times of queues that are open together overlap.
        let mut busy = Span::default();
        for open in open {
            let totals = IoTotals::of_stats(&open.counters.totals());
            busy = busy.max(totals.busy);
            sum.add(&IoTotals { busy: Span::default(), ..totals });
        }
        sum.busy = sum.busy.max(busy);
        sum
    }

    /// Statistics of the closed queues of the controller.
    pub fn closed_queues(&self) -> IoStats {
        self.closed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl QueueIoStats {
    /// Counters of the queue's commands for a namespace.
    pub(crate) fn register(&self, nsid: u32) -> RegisteredCounters {
        let IoStatsSource { table, host, cntlid, closed } = &self.controller;
        let counters = Arc::new(IoCounters::new(true));
        let (queue, host) = ((*cntlid, self.qid), Arc::clone(host));
        let controller = Arc::clone(closed);
        let entry = OpenCounters { host, queue, nsid, counters: Arc::clone(&counters), controller };
        let mut state = table.lock();
        let id = state.next_id;
        state.next_id += 1;
        state.open.insert(id, entry);
        drop(state);
        RegisteredCounters { counters, table: Arc::clone(table), id }
    }
}

impl RegisteredCounters {
    #[inline]
    pub(crate) fn counters(&self) -> &IoCounters {
        &self.counters
    }
}

impl Drop for RegisteredCounters {
    fn drop(&mut self) {
        self.table.close(self.id);
    }
}

fn snapshot(counters: &IoCounters) -> IoStats {
    // No lock is waited for.
    counters.snapshot(|_| Span::default())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tenmil_base::{IoStatus, Operation, Span};

    use super::{CLOSED_MAX, IoStatsSource, IoStatsTable, IoTotals, QueueIoStats};

    /// Host, queue, namespace and number of reads.
    type Reads = (String, Option<(u16, u16)>, u32, u64);

    fn reads(table: &IoStatsTable) -> Vec<Reads> {
        let samples = table.samples().into_iter();
        samples
            .map(|sample| {
                let reads = sample.stats.operation_stats(Operation::Read).count;
                (sample.host.to_string(), sample.queue, sample.nsid, reads)
            })
            .collect()
    }

    #[test]
    fn counts_of_closed_queues_are_kept_by_host_and_namespace() {
        let table = Arc::<IoStatsTable>::default();
        let queue =
            |host, cntlid, qid| QueueIoStats { controller: table.source(host, cntlid), qid };
        let first = queue("one", 1, 1).register(7);
        let second = queue("one", 1, 2).register(7);
        let other = queue("two", 2, 1).register(7);
        let unused = queue("three", 3, 1).register(7);
        for (count, queue) in [(1, &first), (10, &second), (100, &other)] {
            queue.counters().count_success(Operation::Read as usize, count, 512, 99);
        }
        let of = |host: &str, queue, count| (host.to_owned(), queue, 7, count);
        let all = [of("one", Some((1, 1)), 1), of("one", Some((1, 2)), 10)];
        let all =
            [&all[..], &[of("two", Some((2, 1)), 100), of("three", Some((3, 1)), 0)]].concat();
        assert_eq!(reads(&table), all);
        drop((first, unused));
        assert_eq!(
            reads(&table),
            [of("one", Some((1, 2)), 10), of("two", Some((2, 1)), 100), of("one", None, 1)]
        );
        drop((second, other));
        assert_eq!(reads(&table), [of("one", None, 11), of("two", None, 100)]);
    }

    #[test]
    fn totals_of_a_controller_include_its_open_and_closed_queues() {
        let table = Arc::<IoStatsTable>::default();
        let (one, other) = (table.source("host", 1), table.source("host", 1));
        let register = |source: &IoStatsSource, qid| {
            QueueIoStats { controller: source.clone(), qid }.register(1)
        };
        let [first, second, foreign] = [register(&one, 1), register(&one, 2), register(&other, 1)];
        for queue in [&first, &second, &foreign] {
            queue.counters().count_success(Operation::Read as usize, 3, 3 * 512, 9);
            queue.counters().count_success(Operation::Verify as usize, 1, 4096, 9);
            queue.counters().count_failure(Operation::Write as usize, IoStatus::NO_DEVICE);
            queue.counters().add_busy(Span::from_us(5));
        }
        let expected = IoTotals {
            read_bytes: 2 * (3 * 512 + 4096),
            written_bytes: 0,
            read_commands: 6,
            write_commands: 2,
            busy: Span::from_us(5),
        };
        assert_eq!(one.totals(), expected);
        drop(first);
        assert_eq!(one.totals(), expected);
        drop(second);
        assert_eq!(one.totals(), IoTotals { busy: Span::from_us(10), ..expected });
    }

    #[test]
    fn hosts_beyond_the_limit_share_one_entry() {
        let table = Arc::<IoStatsTable>::default();
        for number in 0..CLOSED_MAX + 5 {
            let controller = table.source(&format!("host {number}"), 1);
            let counters = QueueIoStats { controller, qid: 1 }.register(1);
            counters.counters().count_success(Operation::Read as usize, 1, 512, 1);
        }
        let all = reads(&table);
        assert_eq!(all.len(), CLOSED_MAX + 1);
        assert_eq!(all[0], (String::new(), None, 1, 5));
        assert_eq!(all.iter().map(|(.., count)| count).sum::<u64>(), CLOSED_MAX as u64 + 5);
    }
}
