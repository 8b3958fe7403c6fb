//! Checker: compares what hosts read with what completed writes and flushes guarantee.
//!
//! Each block is a register. A write takes effect at one instant between its submission and its
//! completion. A failed write may or may not take effect, but not after a write that was submitted
//! later. A read returns the value at such an instant. All writes and reads of one value form a
//! cluster. A cluster precedes another one if one of its operations ended before an operation of
//! the other began. If two clusters precede each other, no order of instants explains the reads
//! (Gibbons and Korach, Testing Shared Memories, 1997).
//!
//! A power loss begins a new epoch: in each block any value may survive that no flushed write has
//! replaced. What a flush has made durable holds in every epoch.

use std::collections::BTreeMap;
use std::fmt;

use tenmil_base::Instant;

/// Identifier of the write that a block contains. Zero for a block that was never written.
pub(crate) type WriteId = u64;

/// Guarantees by block.
#[derive(Debug, Default)]
pub(crate) struct ConsistencyChecker {
    writes: BTreeMap<WriteId, WriteRecord>,
    blocks: BTreeMap<(usize, u64), BlockGuarantee>,
    /// Last power loss of each disk.
    losses: BTreeMap<usize, Instant>,
    /// Last failed flush by host and disk: the host knows since then that writes may be lost.
    warned: BTreeMap<(usize, usize), Instant>,
    /// When a host has started again last: losses before its first write are not reported to it.
    restarts: BTreeMap<(usize, usize), Instant>,
    /// Which host holds a reservation on a disk, Write Exclusive, and since when it knows.
    reservations: BTreeMap<usize, (usize, Instant)>,
    /// Host that has claimed the pool on each disk last, and when.
    pools: BTreeMap<usize, (usize, Instant)>,
}

/// A write.
#[derive(Clone, Debug)]
struct WriteRecord {
    host: usize,
    disk: usize,
    blocks: (u64, u64),
    begun: Instant,
    ended: Option<Instant>,
    is_success: bool,
}

#[derive(Debug, Default)]
struct BlockGuarantee {
    /// Writes that are not known to be durable.
    unflushed: Vec<WriteId>,
    /// End of each flush, and the submission time of the last write it has made durable.
    durable: Vec<DurableWrite>,
    /// Values written or read since the last power loss.
    clusters: BTreeMap<WriteId, ValueTimes>,
}

#[derive(Clone, Copy, Debug)]
struct DurableWrite {
    from: Instant,
    write: WriteId,
    begun: Instant,
}

/// Known operations of one value.
#[derive(Clone, Copy, Debug)]
struct ValueTimes {
    /// Submission time of the write.
    begun: Instant,
    /// Completion time of the write.
    ended: Instant,
    /// The write has failed: its end only counts for writes that begin later.
    has_failed: bool,
    /// Earliest end of a read.
    read_ended: Instant,
    /// Latest begin of a read.
    read_begun: Instant,
}

/// Completion of a write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WriteEnd {
    /// Completion time.
    pub(crate) ended: Instant,
    /// Whether it was successful.
    pub(crate) is_success: bool,
    /// The write is durable when it completes (FUA).
    pub(crate) is_durable: bool,
    /// Before the completion, reads may have found the write and then the previous value: after a
    /// path loss it may have been sent more than once, or it goes to several legs.
    pub(crate) may_flicker: bool,
}

/// A read of one block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockRead {
    /// Disk.
    pub(crate) disk: usize,
    /// Block.
    pub(crate) lba: u64,
    /// Value found.
    pub(crate) found: WriteId,
    /// Submission time.
    pub(crate) begun: Instant,
    /// Completion time.
    pub(crate) ended: Instant,
}

/// A violated guarantee.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Violation {
    /// The value was never written to this block, or by a write that began later.
    NeverWritten {
        /// Value found.
        found: WriteId,
    },
    /// A value older than one that a flush has made durable.
    FlushedWriteLost {
        /// Value found.
        found: WriteId,
        /// Durable value.
        durable: WriteId,
        /// Time since which it is durable.
        since: Instant,
    },
    /// A value older than a flushed one, without a power loss in between.
    OldWriteLanded {
        /// Value found.
        found: WriteId,
        /// Later value that was flushed.
        newer: WriteId,
    },
    /// Two values that precede each other.
    NotLinearizable {
        /// Value found.
        found: WriteId,
        /// Other value.
        other: WriteId,
    },
}

impl ConsistencyChecker {
    /// Records a submitted write.
    pub(crate) fn record_write_begin(
        &mut self,
        id: WriteId,
        (host, disk): (usize, usize),
        blocks: (u64, u64),
        begun: Instant,
    ) {
        let write = WriteRecord { host, disk, blocks, begun, ended: None, is_success: false };
        self.writes.insert(id, write);
        for lba in blocks.0..blocks.1 {
            self.blocks.entry((disk, lba)).or_default().unflushed.push(id);
        }
    }

    /// Records a completed write.
    ///
    /// # Errors
    ///
    /// The block whose reads no order explains.
    pub(crate) fn record_write_end(
        &mut self,
        id: WriteId,
        end: WriteEnd,
    ) -> Result<(), (u64, Violation)> {
        let WriteEnd { ended, is_success, is_durable, may_flicker } = end;
        let Some(write) = self.writes.get_mut(&id) else { return Ok(()) };
        (write.ended, write.is_success) = (Some(ended), is_success);
        let WriteRecord { disk, blocks, begun, .. } = *write;
        let mut broken = Ok(());
        for lba in blocks.0..blocks.1 {
            let Some(block) = self.blocks.get_mut(&(disk, lba)) else { continue };
            if let Some(cluster) = block.clusters.get_mut(&id) {
                (cluster.ended, cluster.has_failed) = (ended, !is_success);
                if may_flicker || !is_success {
                    cluster.forget_reads();
                }
                broken = broken.and(block.check_linearizable(id).map_err(|why| (lba, why)));
            } else if is_success {
                block.clusters.insert(id, ValueTimes::from_write(begun, ended));
            }
            if is_success && is_durable {
                block.make_durable(DurableWrite { from: ended, write: id, begun });
            }
        }
        broken
    }

    /// Records a successful flush of `host`. It makes durable every write that completed before the
    /// flush began, if the write was submitted after the last power loss, or if it is one of `host`
    /// and no flush has reported the loss to `host`.
    pub(crate) fn record_flush(
        &mut self,
        host: usize,
        disk: usize,
        begun: Instant,
        ended: Instant,
    ) {
        let lost = self.losses.get(&disk).copied().unwrap_or_default();
        let warned = self.warned.get(&(host, disk)).copied().unwrap_or_default();
        let restarted = self.restarts.get(&(host, disk)).copied().unwrap_or_default();
        let Self { writes, blocks, .. } = self;
        for (_, block) in blocks.range_mut((disk, 0)..(disk + 1, 0)) {
            let is_covered = |id: &&WriteId| {
                let write = &writes[*id];
                let is_told = write.is_success && write.ended.is_some_and(|ended| ended < begun);
                let has_survived = write.begun > lost;
                let is_own = write.host == host && write.begun >= restarted;
                // A failed flush does not cover writes that completed later.
                let is_warned = warned > lost && write.ended.is_some_and(|ended| ended <= warned);
                is_told && (has_survived || is_own && !is_warned)
            };
            let newest =
                block.unflushed.iter().filter(is_covered).max_by_key(|id| writes[*id].begun);
            let Some(&newest) = newest else { continue };
            let newest_begun = writes[&newest].begun;
            block.make_durable(DurableWrite { from: ended, write: newest, begun: newest_begun });
            block.unflushed.retain(|id| {
                let write = &writes[id];
                write.ended.is_none_or(|ended| ended >= newest_begun) && *id != newest
            });
        }
    }

    /// Records a failed flush of `host`: its writes that completed before the last power loss may
    /// be lost, and no later flush guarantees them.
    pub(crate) fn record_flush_failure(&mut self, host: usize, disk: usize, ended: Instant) {
        self.warned.insert((host, disk), ended);
        let lost = self.losses.get(&disk).copied().unwrap_or_default();
        let Self { writes, blocks, .. } = self;
        let is_provisioned = |id: &WriteId| {
            let write = &writes[id];
            write.host != host || write.begun > lost || write.ended.is_none()
        };
        for (_, block) in blocks.range_mut((disk, 0)..(disk + 1, 0)) {
            block.unflushed.retain(is_provisioned);
        }
    }

    /// A host was killed and starts again.
    pub(crate) fn record_host_restart(&mut self, host: usize, disk: usize, now: Instant) {
        self.restarts.insert((host, disk), now);
    }

    /// Checks a successful read.
    ///
    /// # Errors
    ///
    /// The violated guarantee.
    pub(crate) fn check_read(&mut self, read: BlockRead) -> Result<(), Violation> {
        let BlockRead { disk, lba, found, begun, ended } = read;
        let lost = self.losses.get(&disk).copied().unwrap_or_default();
        let write = self.writes.get(&found);
        let is_of_block = write.is_some_and(|write| {
            write.disk == disk && (write.blocks.0..write.blocks.1).contains(&lba)
        });
        if found != 0 && (!is_of_block || write.is_some_and(|write| write.begun >= ended)) {
            return Err(Violation::NeverWritten { found });
        }
        let found_ended = match write {
            Some(write) => write.ended.unwrap_or(Instant::NEVER),
            None => Instant::default(),
        };
        let block = self.blocks.entry((disk, lba)).or_default();
        let durable = block.durable.iter().rev().find(|durable| durable.from < begun);
        if let Some(&DurableWrite { from, write, begun }) = durable
            && found_ended < begun
        {
            return Err(match lost < begun {
                true => Violation::OldWriteLanded { found, newer: write },
                false => Violation::FlushedWriteLost { found, durable: write, since: from },
            });
        }
        if begun < lost {
            // The value may belong to either epoch.
            return Ok(());
        }
        let fresh = || match write {
            Some(write) if found_ended > lost => ValueTimes {
                begun: write.begun,
                ended: found_ended,
                has_failed: write.ended.is_some() && !write.is_success,
                ..ValueTimes::from_write(write.begun, found_ended)
            },
            _ => ValueTimes::from_write(lost, lost),
        };
        let cluster = block.clusters.entry(found).or_insert_with(fresh);
        cluster.read_ended = cluster.read_ended.min(ended);
        cluster.read_begun = cluster.read_begun.max(begun);
        block.check_linearizable(found)
    }

    /// Records that a host holds a reservation on a disk.
    ///
    /// # Errors
    ///
    /// The other host that holds one.
    pub(crate) fn record_reservation(
        &mut self,
        host: usize,
        disk: usize,
        now: Instant,
    ) -> Result<(), usize> {
        let holder = *self.reservations.entry(disk).or_insert((host, now));
        if holder.0 == host { Ok(()) } else { Err(holder.0) }
    }

    /// Records that a host holds a reservation on a disk, and has preempted the one of another host.
    pub(crate) fn record_preemption(&mut self, host: usize, disk: usize, now: Instant) {
        self.reservations.insert(disk, (host, now));
    }

    /// Checks that no write to a disk succeeds that a host has submitted after it was preempted.
    ///
    /// # Errors
    ///
    /// Description of the violation.
    pub(crate) fn check_no_write_after_preemption(
        &self,
        (host, disk): (usize, usize),
        submitted: Instant,
    ) -> Result<(), String> {
        match self.reservations.get(&disk) {
            Some(&(holder, since)) if holder != host && submitted > since => Err(format!(
                "host {host} has written to disk {disk}, expected a reservation conflict: host {holder} \
                 has preempted it at {:.6} s",
                Instant::since(since, Instant::default()).as_secs_f64()
            )),
            _ => Ok(()),
        }
    }

    /// Records that a host is about to release its reservation.
    pub(crate) fn record_release_begin(&mut self, host: usize, disk: usize) {
        self.reservations.retain(|on, (holder, _)| (*on, *holder) != (disk, host));
    }

    /// Checks a completed write: one that began under a reservation of another host must not
    /// succeed, and one of the holder must not fail with a reservation conflict.
    ///
    /// # Errors
    ///
    /// Description of the violation.
    pub(crate) fn check_write_against_reservation(
        &self,
        id: WriteId,
        is_conflict: bool,
    ) -> Result<(), String> {
        let Some(write) = self.writes.get(&id) else { return Ok(()) };
        let Some(&(holder, since)) = self.reservations.get(&write.disk) else { return Ok(()) };
        let since_text = Instant::since(since, Instant::default()).as_secs_f64();
        match (holder == write.host, is_conflict) {
            (false, _) if write.is_success && write.begun > since => Err(format!(
                "the write succeeded, expected a reservation conflict: host {holder} holds disk {} \
                 since {since_text:.6} s",
                write.disk
            )),
            (true, true) if write.begun > since => Err(format!(
                "a reservation conflict, expected success: this host holds disk {} since \
                 {since_text:.6} s",
                write.disk
            )),
            _ => Ok(()),
        }
    }

    /// Records that a host has claimed the pool on a disk.
    pub(crate) fn record_pool_claim(&mut self, (host, disk): (usize, usize), now: Instant) {
        self.pools.insert(disk, (host, now));
    }

    /// Host that has claimed the pool on a disk last.
    pub(crate) fn pool_owner(&self, disk: usize) -> Option<usize> {
        self.pools.get(&disk).map(|(host, _)| *host)
    }

    /// Checks that a host that writes pool metadata owns the pool.
    ///
    /// # Errors
    ///
    /// Description of the violation, with the owner.
    pub(crate) fn check_pool_owner(
        &self,
        (host, disk): (usize, usize),
        now: Instant,
    ) -> Result<(), String> {
        match self.pools.get(&disk) {
            Some(&(owner, since)) if owner != host && since < now => Err(format!(
                "host {host} writes metadata of the pool on disk {disk}, which host {owner} owns since \
                 {:.6} s",
                Instant::since(since, Instant::default()).as_secs_f64()
            )),
            _ => Ok(()),
        }
    }

    /// Records a power loss of a disk.
    pub(crate) fn record_power_loss(&mut self, disk: usize, now: Instant) {
        self.losses.insert(disk, now);
        for (_, block) in self.blocks.range_mut((disk, 0)..(disk + 1, 0)) {
            block.clusters.clear();
        }
    }
}

impl BlockGuarantee {
    /// Checks that some order explains the known operations of a value.
    fn check_linearizable(&self, found: WriteId) -> Result<(), Violation> {
        let Some(cluster) = self.clusters.get(&found) else { return Ok(()) };
        // A write that has not completed may be sent again.
        let is_open = |cluster: &ValueTimes| cluster.ended == Instant::NEVER;
        if is_open(cluster) {
            return Ok(());
        }
        let conflicts = |other: &ValueTimes| {
            !is_open(other) && cluster.precedes(other) && other.precedes(cluster)
        };
        let other = self.clusters.iter().find(|(id, other)| **id != found && conflicts(other));
        match other {
            Some((&other, _)) => Err(Violation::NotLinearizable { found, other }),
            None => Ok(()),
        }
    }

    fn make_durable(&mut self, durable: DurableWrite) {
        // A write submitted before the last durable one adds nothing.
        if self.durable.last().is_none_or(|last| last.begun < durable.begun) {
            self.durable.push(durable);
        }
    }
}

impl ValueTimes {
    const fn from_write(begun: Instant, ended: Instant) -> Self {
        let (read_ended, read_begun) = (Instant::NEVER, Instant { ns: 0 });
        Self { begun, ended, has_failed: false, read_ended, read_begun }
    }

    fn forget_reads(&mut self) {
        (self.read_ended, self.read_begun) = (Instant::NEVER, Instant { ns: 0 });
    }

    /// Whether one of its operations ended before an operation of `other` began.
    fn precedes(&self, other: &Self) -> bool {
        let first_end = self.ended.min(self.read_ended);
        let read_end = if self.has_failed { self.read_ended } else { first_end };
        first_end < other.begun || read_end < other.read_begun
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NeverWritten { found } => {
                write!(out, "found w{found}, which was not written to this block before")
            }
            Self::FlushedWriteLost { found, durable, since } => write!(
                out,
                "found w{found}, expected w{durable} or a later write: a flush completed with \
                 success at {:.6} s",
                Instant::since(since, Instant::default()).as_secs_f64()
            ),
            Self::OldWriteLanded { found, newer } => write!(
                out,
                "found w{found}, expected w{newer} or a later write: an old write has landed after it"
            ),
            Self::NotLinearizable { found, other } => write!(
                out,
                "found w{found}, which no order of the writes explains: w{other} is both older and \
                 newer"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Instant;

    use super::{BlockRead, ConsistencyChecker, Violation, WriteEnd};

    const BLOCK: (u64, u64) = (5, 6);

    fn instant_of_ms(ms: u64) -> Instant {
        Instant { ns: ms * 1_000_000 }
    }

    fn record_write(
        checker: &mut ConsistencyChecker,
        id: u64,
        begun: u64,
        ended: u64,
        is_success: bool,
    ) {
        checker.record_write_begin(id, (0, 0), BLOCK, instant_of_ms(begun));
        let ended = instant_of_ms(ended);
        let end = WriteEnd { ended, is_success, is_durable: false, may_flicker: false };
        checker.record_write_end(id, end).unwrap();
    }

    fn check_read_between(
        checker: &mut ConsistencyChecker,
        found: u64,
        begun: u64,
        ended: u64,
    ) -> Result<(), Violation> {
        let (begun, ended) = (instant_of_ms(begun), instant_of_ms(ended));
        checker.check_read(BlockRead { disk: 0, lba: 5, found, begun, ended })
    }

    #[test]
    fn read_returns_the_last_or_a_concurrent_write() {
        let mut checker = ConsistencyChecker::default();
        record_write(&mut checker, 1, 1, 2, true);
        assert_eq!(check_read_between(&mut checker, 1, 3, 4), Ok(()));
        record_write(&mut checker, 2, 5, 8, true);
        assert_eq!(check_read_between(&mut checker, 1, 6, 7), Ok(()));
        assert_eq!(check_read_between(&mut checker, 2, 6, 7), Ok(()));
        assert!(check_read_between(&mut checker, 1, 9, 10).is_err());
        assert_eq!(
            check_read_between(&mut checker, 9, 9, 10),
            Err(Violation::NeverWritten { found: 9 })
        );
    }

    #[test]
    fn concurrent_writes_have_one_order() {
        let mut checker = ConsistencyChecker::default();
        record_write(&mut checker, 1, 1, 9, true);
        record_write(&mut checker, 2, 1, 9, true);
        assert_eq!(check_read_between(&mut checker, 1, 3, 4), Ok(()));
        assert_eq!(check_read_between(&mut checker, 2, 5, 6), Ok(()), "both are under way");
        assert_eq!(
            check_read_between(&mut checker, 1, 10, 11),
            Err(Violation::NotLinearizable { found: 1, other: 2 })
        );
    }

    #[test]
    fn failed_write_may_take_effect_but_not_after_a_later_one() {
        for is_newer_written in [false, true] {
            let mut checker = ConsistencyChecker::default();
            record_write(&mut checker, 1, 1, 2, true);
            record_write(&mut checker, 2, 3, 4, false);
            assert_eq!(check_read_between(&mut checker, 1, 5, 6), Ok(()));
            if is_newer_written {
                record_write(&mut checker, 3, 7, 8, true);
            }
            let found = check_read_between(&mut checker, 2, 9, 10);
            assert_eq!(found.is_err(), is_newer_written, "{found:?}");
        }
    }

    #[test]
    fn flushed_data_survives_and_unflushed_data_may() {
        let mut checker = ConsistencyChecker::default();
        record_write(&mut checker, 1, 1, 2, true);
        record_write(&mut checker, 2, 3, 4, true);
        checker.record_flush(0, 0, instant_of_ms(5), instant_of_ms(6));
        record_write(&mut checker, 3, 7, 8, true);
        record_write(&mut checker, 4, 9, 10, true);
        checker.record_power_loss(0, instant_of_ms(11));
        assert!(matches!(
            check_read_between(&mut checker, 1, 12, 13),
            Err(Violation::FlushedWriteLost { found: 1, durable: 2, .. })
        ));
        assert_eq!(check_read_between(&mut checker, 3, 12, 13), Ok(()));
        assert!(check_read_between(&mut checker, 2, 14, 15).is_err(), "one value has survived");
    }

    #[test]
    fn flush_after_a_loss_covers_writes_completed_before() {
        let mut checker = ConsistencyChecker::default();
        record_write(&mut checker, 1, 1, 2, true);
        checker.record_power_loss(0, instant_of_ms(3));
        checker.record_flush(1, 0, instant_of_ms(4), instant_of_ms(5));
        assert_eq!(
            check_read_between(&mut checker, 0, 6, 7),
            Ok(()),
            "another host has written nothing"
        );
        checker.record_flush(0, 0, instant_of_ms(8), instant_of_ms(9));
        assert!(check_read_between(&mut checker, 0, 10, 11).is_err());
    }

    #[test]
    fn host_notified_of_a_loss_has_no_guarantee_for_it() {
        let mut checker = ConsistencyChecker::default();
        record_write(&mut checker, 1, 1, 2, true);
        checker.record_power_loss(0, instant_of_ms(3));
        checker.record_flush_failure(0, 0, instant_of_ms(5));
        checker.record_flush(0, 0, instant_of_ms(6), instant_of_ms(7));
        assert_eq!(check_read_between(&mut checker, 0, 8, 9), Ok(()));
        checker.record_power_loss(0, instant_of_ms(10));
        checker.record_flush(0, 0, instant_of_ms(11), instant_of_ms(12));
        assert_eq!(
            check_read_between(&mut checker, 0, 13, 14),
            Ok(()),
            "its host knows of the first loss"
        );
        record_write(&mut checker, 2, 15, 16, true);
        checker.record_power_loss(0, instant_of_ms(17));
        checker.record_flush(0, 0, instant_of_ms(18), instant_of_ms(19));
        assert!(
            check_read_between(&mut checker, 0, 20, 21).is_err(),
            "the third loss was not reported"
        );
    }

    #[test]
    fn reservation_excludes_writes_of_others_until_released() {
        let mut checker = ConsistencyChecker::default();
        assert_eq!(checker.record_reservation(1, 0, instant_of_ms(5)), Ok(()));
        assert_eq!(checker.record_reservation(2, 0, instant_of_ms(6)), Err(1));
        record_write(&mut checker, 1, 4, 9, true);
        assert!(checker.check_write_against_reservation(1, false).is_ok(), "it began before");
        record_write(&mut checker, 2, 6, 9, true);
        assert!(checker.check_write_against_reservation(2, false).is_err());
        record_write(&mut checker, 3, 6, 9, false);
        assert!(checker.check_write_against_reservation(3, true).is_ok());
        checker.record_release_begin(1, 0);
        record_write(&mut checker, 4, 10, 11, true);
        assert!(checker.check_write_against_reservation(4, false).is_ok());
        assert_eq!(checker.record_reservation(0, 0, instant_of_ms(12)), Ok(()));
        record_write(&mut checker, 5, 13, 14, false);
        assert!(checker.check_write_against_reservation(5, true).is_err(), "the holder may write");
    }
}
