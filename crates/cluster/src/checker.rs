//! What hosts were promised, held against what they read.
//!
//! Each block is a register. A write takes effect at one moment between its submission and its
//! answer; a write that has failed may take effect or not, but not after a write that was submitted
//! later. A read returns the value of that moment. All writes and reads of one value are a cluster,
//! and one cluster comes before another if one of its operations ended before one of the other's
//! began. If each of two clusters comes before the other, no order of moments explains what was
//! read (Gibbons and Korach, Testing Shared Memories, 1997).
//!
//! A loss of power begins a new epoch: of each block any value survives that no flushed write has
//! replaced. What a flush has made durable holds in every epoch.

use std::collections::BTreeMap;
use std::fmt;

use base::Instant;

/// Which write a block holds: zero for a block that was never written.
pub(crate) type WriteId = u64;

/// The promises, by block.
#[derive(Debug, Default)]
pub(crate) struct Checker {
    writes: BTreeMap<WriteId, Write>,
    blocks: BTreeMap<(usize, u64), Block>,
    /// When the power of a disk was lost last.
    losses: BTreeMap<usize, Instant>,
    /// When a flush of a host on a disk has failed last: its host knows that writes may be lost.
    warned: BTreeMap<(usize, usize), Instant>,
    /// When a host has started again last: what the power took before it has written, nobody tells it.
    restarts: BTreeMap<(usize, usize), Instant>,
    /// Which host holds a reservation on a disk, Write Exclusive, and since when it knows.
    reservations: BTreeMap<usize, (usize, Instant)>,
    /// Which host has claimed the pool on a disk last, and when.
    pools: BTreeMap<usize, (usize, Instant)>,
}

/// A write.
#[derive(Clone, Debug)]
struct Write {
    host: usize,
    disk: usize,
    blocks: (u64, u64),
    begun: Instant,
    ended: Option<Instant>,
    is_success: bool,
}

#[derive(Debug, Default)]
struct Block {
    /// What was written and is not known to be durable.
    unflushed: Vec<WriteId>,
    /// When a flush ended, and when the last write had begun that it has made durable.
    durable: Vec<Durable>,
    /// What was written or read since the power was lost last.
    clusters: BTreeMap<WriteId, Cluster>,
}

#[derive(Clone, Copy, Debug)]
struct Durable {
    from: Instant,
    write: WriteId,
    begun: Instant,
}

/// What is known of the moments at which a value was there.
#[derive(Clone, Copy, Debug)]
struct Cluster {
    /// When its write began.
    begun: Instant,
    /// When its write was answered.
    ended: Instant,
    /// Its write has failed: it ends only for writes that begin later.
    has_failed: bool,
    /// The earliest end of a read.
    read_ended: Instant,
    /// The latest begin of a read.
    read_begun: Instant,
}

/// How a write has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WriteEnd {
    /// When it was answered.
    pub(crate) ended: Instant,
    /// Whether with success.
    pub(crate) is_success: bool,
    /// It was to be durable when it is answered (FUA).
    pub(crate) is_durable: bool,
    /// Until it was answered, reads may have found it and then what was before: a path was lost, so that
    /// it may have been sent more than once, or it goes to several legs.
    pub(crate) may_flicker: bool,
}

/// A read of one block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Read {
    /// Which disk.
    pub(crate) disk: usize,
    /// Which block.
    pub(crate) lba: u64,
    /// What it has returned.
    pub(crate) found: WriteId,
    /// When it was submitted.
    pub(crate) begun: Instant,
    /// When it was answered.
    pub(crate) ended: Instant,
}

/// A promise that was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    /// What is found was never written to this block, or by a write that began later.
    NeverWritten {
        /// What was found.
        found: WriteId,
    },
    /// An older value than one that a flush has made durable.
    FlushedWriteLost {
        /// What was found.
        found: WriteId,
        /// What is durable.
        durable: WriteId,
        /// Since when.
        since: Instant,
    },
    /// An older value than one that was flushed, though the power was not lost since.
    OldWriteLanded {
        /// What was found.
        found: WriteId,
        /// What was written later, and flushed.
        newer: WriteId,
    },
    /// Two values that each come before the other.
    NotLinearizable {
        /// What was found.
        found: WriteId,
        /// The other one.
        other: WriteId,
    },
}

impl Checker {
    /// A write was submitted.
    pub(crate) fn write_begins(
        &mut self,
        id: WriteId,
        (host, disk): (usize, usize),
        blocks: (u64, u64),
        begun: Instant,
    ) {
        let write = Write { host, disk, blocks, begun, ended: None, is_success: false };
        self.writes.insert(id, write);
        for lba in blocks.0..blocks.1 {
            self.blocks.entry((disk, lba)).or_default().unflushed.push(id);
        }
    }

    /// A write was answered.
    ///
    /// # Errors
    ///
    /// Which block of it was read in a way that no order explains.
    pub(crate) fn write_ends(&mut self, id: WriteId, end: WriteEnd) -> Result<(), (u64, Broken)> {
        let WriteEnd { ended, is_success, is_durable, may_flicker } = end;
        let Some(write) = self.writes.get_mut(&id) else { return Ok(()) };
        (write.ended, write.is_success) = (Some(ended), is_success);
        let Write { disk, blocks, begun, .. } = *write;
        let mut broken = Ok(());
        for lba in blocks.0..blocks.1 {
            let Some(block) = self.blocks.get_mut(&(disk, lba)) else { continue };
            if let Some(cluster) = block.clusters.get_mut(&id) {
                (cluster.ended, cluster.has_failed) = (ended, !is_success);
                if may_flicker || !is_success {
                    cluster.forget_reads();
                }
                broken = broken.and(block.check(id).map_err(|why| (lba, why)));
            } else if is_success {
                block.clusters.insert(id, Cluster::of_write(begun, ended));
            }
            if is_success && is_durable {
                block.make_durable(Durable { from: ended, write: id, begun });
            }
        }
        broken
    }

    /// A flush of `host` was answered with success: what it was told to be written before is durable,
    /// and what others have written since the power was lost last.
    pub(crate) fn flush_ends(&mut self, host: usize, disk: usize, begun: Instant, ended: Instant) {
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
                // A flush that has failed says nothing of what was answered later.
                let is_warned = warned > lost && write.ended.is_some_and(|ended| ended <= warned);
                is_told && (has_survived || is_own && !is_warned)
            };
            let newest =
                block.unflushed.iter().filter(is_covered).max_by_key(|id| writes[*id].begun);
            let Some(&newest) = newest else { continue };
            let newest_begun = writes[&newest].begun;
            block.make_durable(Durable { from: ended, write: newest, begun: newest_begun });
            block.unflushed.retain(|id| {
                let write = &writes[id];
                write.ended.is_none_or(|ended| ended >= newest_begun) && *id != newest
            });
        }
    }

    /// A flush of `host` has failed: what it was told to be written before the power was lost last may
    /// be lost, and no later flush promises it.
    pub(crate) fn flush_fails(&mut self, host: usize, disk: usize, ended: Instant) {
        self.warned.insert((host, disk), ended);
        let lost = self.losses.get(&disk).copied().unwrap_or_default();
        let Self { writes, blocks, .. } = self;
        let is_promised = |id: &WriteId| {
            let write = &writes[id];
            write.host != host || write.begun > lost || write.ended.is_none()
        };
        for (_, block) in blocks.range_mut((disk, 0)..(disk + 1, 0)) {
            block.unflushed.retain(is_promised);
        }
    }

    /// A host was killed and starts again.
    pub(crate) fn host_restarts(&mut self, host: usize, disk: usize, now: Instant) {
        self.restarts.insert((host, disk), now);
    }

    /// A read was answered with success.
    ///
    /// # Errors
    ///
    /// Which promise it has broken.
    pub(crate) fn read_ends(&mut self, read: Read) -> Result<(), Broken> {
        let Read { disk, lba, found, begun, ended } = read;
        let lost = self.losses.get(&disk).copied().unwrap_or_default();
        let write = self.writes.get(&found);
        let is_of_block = write.is_some_and(|write| {
            write.disk == disk && (write.blocks.0..write.blocks.1).contains(&lba)
        });
        if found != 0 && (!is_of_block || write.is_some_and(|write| write.begun >= ended)) {
            return Err(Broken::NeverWritten { found });
        }
        let found_ended = match write {
            Some(write) => write.ended.unwrap_or(Instant::NEVER),
            None => Instant::default(),
        };
        let block = self.blocks.entry((disk, lba)).or_default();
        let durable = block.durable.iter().rev().find(|durable| durable.from < begun);
        if let Some(&Durable { from, write, begun }) = durable
            && found_ended < begun
        {
            return Err(match lost < begun {
                true => Broken::OldWriteLanded { found, newer: write },
                false => Broken::FlushedWriteLost { found, durable: write, since: from },
            });
        }
        if begun < lost {
            // It may be of either epoch.
            return Ok(());
        }
        let fresh = || match write {
            Some(write) if found_ended > lost => Cluster {
                begun: write.begun,
                ended: found_ended,
                has_failed: write.ended.is_some() && !write.is_success,
                ..Cluster::of_write(write.begun, found_ended)
            },
            _ => Cluster::of_write(lost, lost),
        };
        let cluster = block.clusters.entry(found).or_insert_with(fresh);
        cluster.read_ended = cluster.read_ended.min(ended);
        cluster.read_begun = cluster.read_begun.max(begun);
        block.check(found)
    }

    /// A host was told that it holds a reservation on a disk.
    ///
    /// # Errors
    ///
    /// Which other host holds one.
    pub(crate) fn reserved(&mut self, host: usize, disk: usize, now: Instant) -> Result<(), usize> {
        let holder = *self.reservations.entry(disk).or_insert((host, now));
        if holder.0 == host { Ok(()) } else { Err(holder.0) }
    }

    /// A host is about to release its reservation.
    pub(crate) fn release_begins(&mut self, host: usize, disk: usize) {
        self.reservations.retain(|on, (holder, _)| (*on, *holder) != (disk, host));
    }

    /// A write was answered: one that began under a reservation of another host must not succeed, and
    /// the holder's must not be refused for a reservation.
    ///
    /// # Errors
    ///
    /// What is wrong.
    pub(crate) fn reservation_is_kept(&self, id: WriteId, is_conflict: bool) -> Result<(), String> {
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

    /// A host has claimed the pool on a disk.
    pub(crate) fn pool_claimed(&mut self, (host, disk): (usize, usize), now: Instant) {
        self.pools.insert(disk, (host, now));
    }

    /// Which host has claimed the pool on a disk last.
    pub(crate) fn pool_owner(&self, disk: usize) -> Option<usize> {
        self.pools.get(&disk).map(|(host, _)| *host)
    }

    /// A host writes metadata of a pool, which it must own.
    ///
    /// # Errors
    ///
    /// Who does.
    pub(crate) fn pool_is_kept(
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

    /// The power of a disk is lost.
    pub(crate) fn power_lost(&mut self, disk: usize, now: Instant) {
        self.losses.insert(disk, now);
        for (_, block) in self.blocks.range_mut((disk, 0)..(disk + 1, 0)) {
            block.clusters.clear();
        }
    }
}

impl Block {
    /// Whether some order explains what is known of a value.
    fn check(&self, found: WriteId) -> Result<(), Broken> {
        let Some(cluster) = self.clusters.get(&found) else { return Ok(()) };
        // One that was not answered may be sent again.
        let is_open = |cluster: &Cluster| cluster.ended == Instant::NEVER;
        if is_open(cluster) {
            return Ok(());
        }
        let conflicts =
            |other: &Cluster| !is_open(other) && cluster.precedes(other) && other.precedes(cluster);
        let other = self.clusters.iter().find(|(id, other)| **id != found && conflicts(other));
        match other {
            Some((&other, _)) => Err(Broken::NotLinearizable { found, other }),
            None => Ok(()),
        }
    }

    fn make_durable(&mut self, durable: Durable) {
        // What has begun before another durable write proves nothing more.
        if self.durable.last().is_none_or(|last| last.begun < durable.begun) {
            self.durable.push(durable);
        }
    }
}

impl Cluster {
    const fn of_write(begun: Instant, ended: Instant) -> Self {
        let (read_ended, read_begun) = (Instant::NEVER, Instant { ns: 0 });
        Self { begun, ended, has_failed: false, read_ended, read_begun }
    }

    fn forget_reads(&mut self) {
        (self.read_ended, self.read_begun) = (Instant::NEVER, Instant { ns: 0 });
    }

    /// Whether an operation of it ended before one of `other` began.
    fn precedes(&self, other: &Self) -> bool {
        let first_end = self.ended.min(self.read_ended);
        let read_end = if self.has_failed { self.read_ended } else { first_end };
        first_end < other.begun || read_end < other.read_begun
    }
}

impl fmt::Display for Broken {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NeverWritten { found } => {
                write!(out, "found w{found}, which was not written to this block before")
            }
            Self::FlushedWriteLost { found, durable, since } => write!(
                out,
                "found w{found}, expected w{durable} or a later write: a flush was answered with \
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
    use base::Instant;

    use super::{Broken, Checker, Read, WriteEnd};

    const BLOCK: (u64, u64) = (5, 6);

    fn at(ms: u64) -> Instant {
        Instant { ns: ms * 1_000_000 }
    }

    fn write(checker: &mut Checker, id: u64, begun: u64, ended: u64, is_success: bool) {
        checker.write_begins(id, (0, 0), BLOCK, at(begun));
        let ended = at(ended);
        let end = WriteEnd { ended, is_success, is_durable: false, may_flicker: false };
        checker.write_ends(id, end).unwrap();
    }

    fn read(checker: &mut Checker, found: u64, begun: u64, ended: u64) -> Result<(), Broken> {
        let (begun, ended) = (at(begun), at(ended));
        checker.read_ends(Read { disk: 0, lba: 5, found, begun, ended })
    }

    #[test]
    fn a_read_returns_the_last_write_or_a_concurrent_one() {
        let mut checker = Checker::default();
        write(&mut checker, 1, 1, 2, true);
        assert_eq!(read(&mut checker, 1, 3, 4), Ok(()));
        write(&mut checker, 2, 5, 8, true);
        assert_eq!(read(&mut checker, 1, 6, 7), Ok(()));
        assert_eq!(read(&mut checker, 2, 6, 7), Ok(()));
        assert!(read(&mut checker, 1, 9, 10).is_err());
        assert_eq!(read(&mut checker, 9, 9, 10), Err(Broken::NeverWritten { found: 9 }));
    }

    #[test]
    fn concurrent_writes_have_one_order() {
        let mut checker = Checker::default();
        write(&mut checker, 1, 1, 9, true);
        write(&mut checker, 2, 1, 9, true);
        assert_eq!(read(&mut checker, 1, 3, 4), Ok(()));
        assert_eq!(read(&mut checker, 2, 5, 6), Ok(()), "both are under way");
        assert_eq!(
            read(&mut checker, 1, 10, 11),
            Err(Broken::NotLinearizable { found: 1, other: 2 })
        );
    }

    #[test]
    fn a_failed_write_may_take_effect_but_not_after_a_later_one() {
        for is_newer_written in [false, true] {
            let mut checker = Checker::default();
            write(&mut checker, 1, 1, 2, true);
            write(&mut checker, 2, 3, 4, false);
            assert_eq!(read(&mut checker, 1, 5, 6), Ok(()));
            if is_newer_written {
                write(&mut checker, 3, 7, 8, true);
            }
            let found = read(&mut checker, 2, 9, 10);
            assert_eq!(found.is_err(), is_newer_written, "{found:?}");
        }
    }

    #[test]
    fn what_was_flushed_survives_and_what_was_not_may() {
        let mut checker = Checker::default();
        write(&mut checker, 1, 1, 2, true);
        write(&mut checker, 2, 3, 4, true);
        checker.flush_ends(0, 0, at(5), at(6));
        write(&mut checker, 3, 7, 8, true);
        write(&mut checker, 4, 9, 10, true);
        checker.power_lost(0, at(11));
        assert!(matches!(
            read(&mut checker, 1, 12, 13),
            Err(Broken::FlushedWriteLost { found: 1, durable: 2, .. })
        ));
        assert_eq!(read(&mut checker, 3, 12, 13), Ok(()));
        assert!(read(&mut checker, 2, 14, 15).is_err(), "one value has survived");
    }

    #[test]
    fn a_flush_after_a_loss_covers_what_its_host_was_told_before() {
        let mut checker = Checker::default();
        write(&mut checker, 1, 1, 2, true);
        checker.power_lost(0, at(3));
        checker.flush_ends(1, 0, at(4), at(5));
        assert_eq!(read(&mut checker, 0, 6, 7), Ok(()), "another host has written nothing");
        checker.flush_ends(0, 0, at(8), at(9));
        assert!(read(&mut checker, 0, 10, 11).is_err());
    }

    #[test]
    fn a_host_that_was_warned_is_promised_nothing_of_what_was_lost() {
        let mut checker = Checker::default();
        write(&mut checker, 1, 1, 2, true);
        checker.power_lost(0, at(3));
        checker.flush_fails(0, 0, at(5));
        checker.flush_ends(0, 0, at(6), at(7));
        assert_eq!(read(&mut checker, 0, 8, 9), Ok(()));
        checker.power_lost(0, at(10));
        checker.flush_ends(0, 0, at(11), at(12));
        assert_eq!(read(&mut checker, 0, 13, 14), Ok(()), "its host knows of the first loss");
        write(&mut checker, 2, 15, 16, true);
        checker.power_lost(0, at(17));
        checker.flush_ends(0, 0, at(18), at(19));
        assert!(read(&mut checker, 0, 20, 21).is_err(), "the third loss was not told");
    }

    #[test]
    fn a_reservation_excludes_the_writes_of_others_until_it_is_released() {
        let mut checker = Checker::default();
        assert_eq!(checker.reserved(1, 0, at(5)), Ok(()));
        assert_eq!(checker.reserved(2, 0, at(6)), Err(1));
        write(&mut checker, 1, 4, 9, true);
        assert!(checker.reservation_is_kept(1, false).is_ok(), "it began before");
        write(&mut checker, 2, 6, 9, true);
        assert!(checker.reservation_is_kept(2, false).is_err());
        write(&mut checker, 3, 6, 9, false);
        assert!(checker.reservation_is_kept(3, true).is_ok());
        checker.release_begins(1, 0);
        write(&mut checker, 4, 10, 11, true);
        assert!(checker.reservation_is_kept(4, false).is_ok());
        assert_eq!(checker.reserved(0, 0, at(12)), Ok(()));
        write(&mut checker, 5, 13, 14, false);
        assert!(checker.reservation_is_kept(5, true).is_err(), "the holder may write");
    }
}
