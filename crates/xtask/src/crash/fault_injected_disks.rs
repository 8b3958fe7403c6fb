//! Disks of a world, each behind a FUSE mount of its own, and the events at their syncs.
//!
//! ```text
//!   tenmil serve ──▶ kernel ──▶ /dev/fuse ──▶ a thread here ──▶ Disks ──▶ Medium
//!                                                                 └── trap: kill, lose power, fail, stall
//! ```
//!
//! One lock covers all disks, so that a power loss is atomic with respect to the requests of every
//! disk.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tenmil_base::Random;

use super::server_process::ServerProcess;
use super::volatile_cache_disk::{SurvivingData, VolatileCacheMedium};
use crate::fuse_mount::FuseMount;
use crate::fuse_protocol::{FuseOperation, FuseReply, FuseRequest, ROOT, errno, is_root_node};

/// Threads per mount, so that one write can be held back while others proceed.
const THREADS: usize = 3;

/// Disks of a world with their traps.
#[derive(Debug)]
pub(super) struct FaultInjectedDisks {
    disks: Vec<FaultInjectedDisk>,
    /// Traps in order; only the first one is armed.
    traps: VecDeque<SyncTrap>,
    /// Reports of the traps that have fired.
    pub(super) fired: Vec<FiredTrap>,
    random: Random,
    /// Syncs and forced writes succeed without effect, to show that the test notices.
    ignores_syncs: bool,
}

#[derive(Debug, Default)]
struct FaultInjectedDisk {
    medium: VolatileCacheMedium,
    /// Syncs since the first trap was set or the last one fired.
    syncs: u64,
    writes: u64,
    /// Syncs since the first trap was set.
    syncs_of_round: u64,
}

/// Event at a request of a disk.
#[derive(Clone, Debug)]
pub(super) struct SyncTrap {
    /// Disk whose requests are counted.
    pub(super) disk: usize,
    /// Number of the request, counted from 1.
    pub(super) at: u64,
    pub(super) moment: TrapPoint,
    /// Processes to kill.
    pub(super) kill: Vec<ServerProcess>,
    /// Disks that lose power.
    pub(super) lose: Vec<usize>,
    /// Unsynced data that those disks keep.
    pub(super) keep: SurvivingData,
}

/// Moment of the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TrapPoint {
    /// A sync has arrived and is not executed.
    BeforeSync,
    /// A sync was executed and is not completed.
    AfterSync,
    /// A sync fails, and part of the unsynced data is lost; no process is killed.
    FailedSync,
    /// A write is delayed by this many milliseconds.
    HeldWrite(u64),
}

/// Report of a trap that has fired.
#[derive(Clone, Debug)]
pub(super) struct FiredTrap {
    pub(super) when: Instant,
    /// Unsynced sectors of all disks that lost power.
    pub(super) unsynced: usize,
    /// Number of processes that were killed.
    pub(super) kills: usize,
    /// Number of disks that lost power, or unsynced data.
    pub(super) losses: usize,
    /// It fired at its request, and not after the workload.
    pub(super) at_request: bool,
}

/// Shared handle to the disks.
pub(super) type SharedDisks = Arc<Mutex<FaultInjectedDisks>>;

pub(super) fn lock(disks: &SharedDisks) -> MutexGuard<'_, FaultInjectedDisks> {
    disks.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FaultInjectedDisks {
    pub(super) fn new(count: usize, seed: u64, ignores_syncs: bool) -> Self {
        let disks = std::iter::repeat_with(FaultInjectedDisk::default).take(count).collect();
        let (traps, fired, random) = (VecDeque::new(), Vec::new(), Random::new(seed));
        Self { disks, traps, fired, random, ignores_syncs }
    }

    /// Replaces all disks by new ones.
    pub(super) fn replace_all(&mut self) {
        for disk in &mut self.disks {
            disk.medium.remove_all();
        }
        self.clear_traps();
    }

    pub(super) fn set_traps(&mut self, traps: Vec<SyncTrap>) {
        self.traps = traps.into();
        self.fired.clear();
        self.reset_round();
        for disk in &mut self.disks {
            disk.syncs_of_round = 0;
        }
    }

    pub(super) fn clear_traps(&mut self) {
        self.traps.clear();
    }

    fn reset_round(&mut self) {
        for disk in &mut self.disks {
            (disk.syncs, disk.writes) = (0, 0);
        }
    }

    /// Number of syncs of a disk since the first trap was set.
    pub(super) fn syncs_of_round(&self, disk: usize) -> u64 {
        self.disks[disk].syncs_of_round
    }

    /// Content of a file.
    pub(super) fn file_content(&mut self, disk: usize, name: &str) -> Vec<u8> {
        let medium = &mut self.disks[disk].medium;
        let file = medium.find_node(name).and_then(|node| medium.file_mut(node));
        file.map_or_else(Vec::new, |file| file.read(0, usize::MAX))
    }

    /// Fires the remaining traps at once. Returns their number. A sync that should fail is the next one: a disk
    /// that loses data while it executes none, and then completes one, would lie.
    pub(super) fn fire_remaining(&mut self) -> usize {
        let count = self.traps.len();
        for trap in std::mem::take(&mut self.traps) {
            if trap.moment == TrapPoint::FailedSync {
                self.traps.push_back(SyncTrap { at: 0, ..trap });
            } else {
                self.fire_trap(&trap, false);
            }
        }
        count
    }

    fn take_trap(&mut self, disk: usize, is_write: bool) -> Option<SyncTrap> {
        let seen = if is_write { self.disks[disk].writes } else { self.disks[disk].syncs };
        let first = self.traps.front()?;
        let fits =
            first.disk == disk && matches!(first.moment, TrapPoint::HeldWrite(_)) == is_write;
        if !fits || seen < first.at {
            return None;
        }
        self.traps.pop_front()
    }

    fn fire_trap(&mut self, trap: &SyncTrap, at_request: bool) {
        let when = Instant::now();
        // The processes are killed first, so that none runs after its disk has lost data.
        let kills = trap.kill.iter().filter(|server| server.kill_without_wait()).count();
        let unsynced =
            trap.lose.iter().map(|disk| self.disks[*disk].medium.unsynced_sectors()).sum();
        for disk in &trap.lose {
            let medium = &mut self.disks[*disk].medium;
            if trap.moment == TrapPoint::FailedSync {
                medium.lose_cache(trap.keep, &mut self.random);
            } else {
                medium.lose_power(trap.keep, &mut self.random);
            }
        }
        let losses = trap.lose.len();
        self.fired.push(FiredTrap { when, unsynced, kills, losses, at_request });
        self.reset_round();
    }

    fn handle_sync(&mut self, disk: usize, node: u64) -> Result<FuseReply, i32> {
        self.disks[disk].syncs += 1;
        self.disks[disk].syncs_of_round += 1;
        let trap = self.take_trap(disk, false);
        let epoch = self.disks[disk].medium.epoch;
        if let Some(trap) = trap.as_ref().filter(|trap| trap.moment != TrapPoint::AfterSync) {
            self.fire_trap(trap, true);
            // If only the host is killed, the sync proceeds.
            let own = ["target-a", "target-b"][disk];
            let is_hit =
                trap.lose.contains(&disk) || trap.kill.iter().any(|it| it.process_name() == own);
            if is_hit && trap.moment == TrapPoint::BeforeSync
                || trap.moment == TrapPoint::FailedSync
            {
                return Err(errno::IO);
            }
        }
        let is_ignored = self.ignores_syncs;
        let file = self.disks[disk].medium.file_mut(node).ok_or(errno::NOENT)?;
        if !is_ignored {
            file.sync();
        }
        if let Some(trap) = trap.as_ref().filter(|trap| trap.moment == TrapPoint::AfterSync) {
            self.fire_trap(trap, true);
        }
        if self.disks[disk].medium.epoch == epoch { Ok(FuseReply::empty()) } else { Err(errno::IO) }
    }

    fn handle_request(
        &mut self,
        disk: usize,
        request: &FuseRequest,
        bytes: &[u8],
    ) -> Result<FuseReply, i32> {
        let FuseRequest { node, handle, operation, .. } = request;
        let ignores_syncs = self.ignores_syncs;
        let medium = &mut self.disks[disk].medium;
        let epoch = medium.epoch;
        let opened = matches!(
            operation,
            FuseOperation::Read { .. }
                | FuseOperation::Write { .. }
                | FuseOperation::Zero { .. }
                | FuseOperation::Grow { .. }
                | FuseOperation::Sync
        );
        // A handle from before a power loss is stale; its owner has to reopen the file.
        if opened && *handle != epoch {
            return Err(errno::IO);
        }
        match operation {
            FuseOperation::Init { minor } => return Ok(FuseReply::init_result(*minor)),
            FuseOperation::Lookup { name } => {
                let node = medium.find_node(name).ok_or(errno::NOENT)?;
                return Ok(FuseReply::entry_result(
                    node,
                    medium.file_mut(node).map(|file| file.size()),
                ));
            }
            FuseOperation::Create { name } => {
                let node = medium.create(name);
                return Ok(FuseReply::create_result(
                    node,
                    medium.file_mut(node).map(|file| file.size()),
                    epoch,
                ));
            }
            FuseOperation::Unlink { name } => {
                return medium.unlink(name).then(FuseReply::empty).ok_or(errno::NOENT);
            }
            FuseOperation::OpenDirectory => return Ok(FuseReply::opendir_result(epoch)),
            FuseOperation::List { offset } => {
                return Ok(FuseReply::directory_entries(medium.names_with_nodes(), *offset));
            }
            FuseOperation::SyncDirectory => {
                medium.sync_directory();
                return Ok(FuseReply::empty());
            }
            FuseOperation::Statistics => return Ok(FuseReply::statfs_result()),
            FuseOperation::Close => return Ok(FuseReply::empty()),
            FuseOperation::Attributes | FuseOperation::SetOther if is_root_node(*node) => {
                return Ok(FuseReply::attributes_result(ROOT, None));
            }
            FuseOperation::Sync => return self.handle_sync(disk, *node),
            FuseOperation::Note | FuseOperation::Unknown => return Err(errno::NOSYS),
            _ => {}
        }
        let file = medium.file_mut(*node).ok_or(errno::NOENT)?;
        match operation {
            FuseOperation::Attributes | FuseOperation::SetOther => {}
            FuseOperation::SetLen { len } => file.truncate(*len),
            FuseOperation::Open => return Ok(FuseReply::open_result(epoch)),
            FuseOperation::Read { offset, len } => {
                return Ok(FuseReply::data_bytes(file.read(*offset, *len)));
            }
            FuseOperation::Write { offset, forced, at, len } => {
                file.write(*offset, bytes.get(*at..*at + *len).ok_or(errno::INVAL)?);
                if *forced && !ignores_syncs {
                    file.sync_range(*offset, *len);
                }
                return Ok(FuseReply::write_result(*len));
            }
            FuseOperation::Zero { offset, len } => {
                file.zero_range(*offset, *len);
                return Ok(FuseReply::empty());
            }
            FuseOperation::Grow { len } => {
                let len = file.len().max(*len);
                file.truncate(len);
                return Ok(FuseReply::empty());
            }
            FuseOperation::Seek { offset, data } => {
                return file
                    .seek_data_or_hole(*offset, *data)
                    .map(FuseReply::seek_result)
                    .ok_or(errno::NXIO);
            }
            _ => return Err(errno::OPNOTSUPP),
        }
        Ok(FuseReply::attributes_result(*node, Some(file.size())))
    }
}

/// Mounts a disk.
pub(super) fn mount_disk(
    disks: &SharedDisks,
    disk: usize,
    path: &Path,
) -> Result<FuseMount, String> {
    let disks = disks.clone();
    let serve = move |bytes: &[u8]| serve_request(&disks, disk, bytes);
    FuseMount::new(path, "tenmil-crash", THREADS, Arc::new(serve))
}

/// Serves one request, delayed if it is a write that is held back.
fn serve_request(disks: &SharedDisks, disk: usize, bytes: &[u8]) -> Option<Vec<u8>> {
    let request = FuseRequest::parse(bytes);
    if request.operation == FuseOperation::Note {
        return None;
    }
    let mut held = lock(disks);
    if matches!(request.operation, FuseOperation::Write { .. }) {
        held.disks[disk].writes += 1;
        if let Some(trap) = held.take_trap(disk, true) {
            held.fire_trap(&trap, true);
            drop(held);
            if let TrapPoint::HeldWrite(milliseconds) = trap.moment {
                std::thread::sleep(Duration::from_millis(milliseconds));
            }
            held = lock(disks);
        }
    }
    let answer = held.handle_request(disk, &request, bytes);
    drop(held);
    Some(FuseReply::into_bytes(answer, request.unique))
}

#[cfg(test)]
mod tests {
    use super::{FaultInjectedDisks, SurvivingData, SyncTrap, TrapPoint};

    #[test]
    fn disk_loses_data_only_at_a_failing_sync() {
        let mut disks = FaultInjectedDisks::new(1, 1, false);
        let node = disks.disks[0].medium.create("disk");
        let write = |disks: &mut FaultInjectedDisks, byte: u8| {
            let file = disks.disks[0].medium.file_mut(node).expect("it was created");
            file.truncate(4096);
            file.write(0, &[byte; 4096]);
        };
        write(&mut disks, 1);
        assert!(disks.handle_sync(0, node).is_ok());
        write(&mut disks, 2);
        let (moment, keep) = (TrapPoint::FailedSync, SurvivingData::Nothing);
        disks.set_traps(vec![SyncTrap {
            disk: 0,
            at: 9,
            moment,
            kill: vec![],
            lose: vec![0],
            keep,
        }]);
        assert_eq!(disks.fire_remaining(), 1);
        assert_eq!(disks.file_content(0, "disk"), [2; 4096]);
        assert!(disks.fired.is_empty());
        assert!(disks.handle_sync(0, node).is_err());
        assert_eq!((disks.file_content(0, "disk"), disks.fired.len()), (vec![1; 4096], 1));
        assert!(disks.handle_sync(0, node).is_ok(), "once");
    }
}
