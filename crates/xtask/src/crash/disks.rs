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
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tenmil_base::Random;

use super::fuse::{Answer, FuseOperation, Request, WRITE_BYTES_MAX, errno, is_root};
use super::medium::{Keep, Medium, ROOT};
use super::process::Server;

/// Threads per mount, so that one write can be held back while others proceed.
const THREADS: usize = 3;

/// Disks of a world with their traps.
#[derive(Debug)]
pub(super) struct Disks {
    disks: Vec<Disk>,
    /// Traps in order; only the first one is armed.
    traps: VecDeque<Trap>,
    /// Reports of the traps that have fired.
    pub(super) fired: Vec<Fired>,
    random: Random,
    /// Syncs and forced writes succeed without effect, to show that the test notices.
    ignores_syncs: bool,
}

#[derive(Debug, Default)]
struct Disk {
    medium: Medium,
    /// Syncs since the first trap was set or the last one fired.
    syncs: u64,
    writes: u64,
    /// Syncs since the first trap was set.
    syncs_of_round: u64,
}

/// Event at a request of a disk.
#[derive(Clone, Debug)]
pub(super) struct Trap {
    /// Disk whose requests are counted.
    pub(super) disk: usize,
    /// Number of the request, counted from 1.
    pub(super) at: u64,
    pub(super) moment: TrapPoint,
    /// Processes to kill.
    pub(super) kill: Vec<Server>,
    /// Disks that lose power.
    pub(super) lose: Vec<usize>,
    /// Unsynced data that those disks keep.
    pub(super) keep: Keep,
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
pub(super) struct Fired {
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
pub(super) type Shared = Arc<Mutex<Disks>>;

pub(super) fn lock(disks: &Shared) -> MutexGuard<'_, Disks> {
    disks.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Disks {
    pub(super) fn new(count: usize, seed: u64, ignores_syncs: bool) -> Self {
        let disks = std::iter::repeat_with(Disk::default).take(count).collect();
        let (traps, fired, random) = (VecDeque::new(), Vec::new(), Random::new(seed));
        Self { disks, traps, fired, random, ignores_syncs }
    }

    /// Replaces all disks by new ones.
    pub(super) fn clear(&mut self) {
        for disk in &mut self.disks {
            disk.medium.clear();
        }
        self.disarm();
    }

    pub(super) fn arm(&mut self, traps: Vec<Trap>) {
        self.traps = traps.into();
        self.fired.clear();
        self.reset();
        for disk in &mut self.disks {
            disk.syncs_of_round = 0;
        }
    }

    pub(super) fn disarm(&mut self) {
        self.traps.clear();
    }

    fn reset(&mut self) {
        for disk in &mut self.disks {
            (disk.syncs, disk.writes) = (0, 0);
        }
    }

    /// Number of syncs of a disk since the first trap was set.
    pub(super) fn syncs_of_round(&self, disk: usize) -> u64 {
        self.disks[disk].syncs_of_round
    }

    /// Content of a file.
    pub(super) fn content(&mut self, disk: usize, name: &str) -> Vec<u8> {
        let medium = &mut self.disks[disk].medium;
        let file = medium.find(name).and_then(|node| medium.file(node));
        file.map_or_else(Vec::new, |file| file.read(0, usize::MAX))
    }

    /// Fires the remaining traps at once. Returns their number. A sync that should fail is the next one: a disk
    /// that loses data while it executes none, and then completes one, would lie.
    pub(super) fn fire_all(&mut self) -> usize {
        let count = self.traps.len();
        for trap in std::mem::take(&mut self.traps) {
            if trap.moment == TrapPoint::FailedSync {
                self.traps.push_back(Trap { at: 0, ..trap });
            } else {
                self.fire(&trap, false);
            }
        }
        count
    }

    fn take_trap(&mut self, disk: usize, is_write: bool) -> Option<Trap> {
        let seen = if is_write { self.disks[disk].writes } else { self.disks[disk].syncs };
        let first = self.traps.front()?;
        let fits =
            first.disk == disk && matches!(first.moment, TrapPoint::HeldWrite(_)) == is_write;
        if !fits || seen < first.at {
            return None;
        }
        self.traps.pop_front()
    }

    fn fire(&mut self, trap: &Trap, at_request: bool) {
        let when = Instant::now();
        // The processes are killed first, so that none runs after its disk has lost data.
        let kills = trap.kill.iter().filter(|server| server.strike()).count();
        let unsynced = trap.lose.iter().map(|disk| self.disks[*disk].medium.unsynced()).sum();
        for disk in &trap.lose {
            let medium = &mut self.disks[*disk].medium;
            if trap.moment == TrapPoint::FailedSync {
                medium.lose_cache(trap.keep, &mut self.random);
            } else {
                medium.lose_power(trap.keep, &mut self.random);
            }
        }
        let losses = trap.lose.len();
        self.fired.push(Fired { when, unsynced, kills, losses, at_request });
        self.reset();
    }

    fn sync(&mut self, disk: usize, node: u64) -> Result<Answer, i32> {
        self.disks[disk].syncs += 1;
        self.disks[disk].syncs_of_round += 1;
        let trap = self.take_trap(disk, false);
        let epoch = self.disks[disk].medium.epoch;
        if let Some(trap) = trap.as_ref().filter(|trap| trap.moment != TrapPoint::AfterSync) {
            self.fire(trap, true);
            // If only the host is killed, the sync proceeds.
            let own = ["target-a", "target-b"][disk];
            let is_hit = trap.lose.contains(&disk) || trap.kill.iter().any(|it| it.name() == own);
            if is_hit && trap.moment == TrapPoint::BeforeSync
                || trap.moment == TrapPoint::FailedSync
            {
                return Err(errno::IO);
            }
        }
        let is_ignored = self.ignores_syncs;
        let file = self.disks[disk].medium.file(node).ok_or(errno::NOENT)?;
        if !is_ignored {
            file.sync();
        }
        if let Some(trap) = trap.as_ref().filter(|trap| trap.moment == TrapPoint::AfterSync) {
            self.fire(trap, true);
        }
        if self.disks[disk].medium.epoch == epoch { Ok(Answer::empty()) } else { Err(errno::IO) }
    }

    fn answer(&mut self, disk: usize, request: &Request, bytes: &[u8]) -> Result<Answer, i32> {
        let Request { node, handle, operation, .. } = request;
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
            FuseOperation::Init { minor } => return Ok(Answer::init(*minor)),
            FuseOperation::Lookup { name } => {
                let node = medium.find(name).ok_or(errno::NOENT)?;
                return Ok(Answer::entry(node, medium.file(node).map(|file| &*file)));
            }
            FuseOperation::Create { name } => {
                let node = medium.create(name);
                return Ok(Answer::created(node, medium.file(node).map(|file| &*file), epoch));
            }
            FuseOperation::Unlink { name } => {
                return medium.unlink(name).then(Answer::empty).ok_or(errno::NOENT);
            }
            FuseOperation::OpenDirectory => return Ok(Answer::directory(epoch)),
            FuseOperation::List { offset } => return Ok(Answer::list(medium.names(), *offset)),
            FuseOperation::SyncDirectory => {
                medium.sync_names();
                return Ok(Answer::empty());
            }
            FuseOperation::Statistics => return Ok(Answer::statistics()),
            FuseOperation::Close => return Ok(Answer::empty()),
            FuseOperation::Attributes | FuseOperation::SetOther if is_root(*node) => {
                return Ok(Answer::attributes_of(ROOT, None));
            }
            FuseOperation::Sync => return self.sync(disk, *node),
            FuseOperation::Note | FuseOperation::Unknown => return Err(errno::NOSYS),
            _ => {}
        }
        let file = medium.file(*node).ok_or(errno::NOENT)?;
        match operation {
            FuseOperation::Attributes | FuseOperation::SetOther => {}
            FuseOperation::SetLen { len } => file.truncate(*len),
            FuseOperation::Open => return Ok(Answer::open(epoch)),
            FuseOperation::Read { offset, len } => {
                return Ok(Answer::bytes(file.read(*offset, *len)));
            }
            FuseOperation::Write { offset, forced, at, len } => {
                file.write(*offset, bytes.get(*at..*at + *len).ok_or(errno::INVAL)?);
                if *forced && !ignores_syncs {
                    file.sync_range(*offset, *len);
                }
                return Ok(Answer::written(*len));
            }
            FuseOperation::Zero { offset, len } => {
                file.zero(*offset, *len);
                return Ok(Answer::empty());
            }
            FuseOperation::Grow { len } => {
                let len = file.len().max(*len);
                file.truncate(len);
                return Ok(Answer::empty());
            }
            FuseOperation::Seek { offset, data } => {
                return file.seek(*offset, *data).map(Answer::found).ok_or(errno::NXIO);
            }
            _ => return Err(errno::OPNOTSUPP),
        }
        Ok(Answer::attributes_of(*node, Some(file)))
    }
}

/// Serves one request, delayed if it is a write that is held back.
fn serve(disks: &Shared, disk: usize, bytes: &[u8]) -> Option<Vec<u8>> {
    let request = Request::parse(bytes);
    if request.operation == FuseOperation::Note {
        return None;
    }
    let mut held = lock(disks);
    if matches!(request.operation, FuseOperation::Write { .. }) {
        held.disks[disk].writes += 1;
        if let Some(trap) = held.take_trap(disk, true) {
            held.fire(&trap, true);
            drop(held);
            if let TrapPoint::HeldWrite(milliseconds) = trap.moment {
                std::thread::sleep(Duration::from_millis(milliseconds));
            }
            held = lock(disks);
        }
    }
    let answer = held.answer(disk, &request, bytes);
    drop(held);
    Some(Answer::packed(answer, request.unique))
}

/// FUSE mount of a disk, unmounted on drop.
#[derive(Debug)]
pub(super) struct Mount {
    path: PathBuf,
}

impl Mount {
    pub(super) fn new(disks: &Shared, disk: usize, path: &Path) -> Result<Self, String> {
        let refuse = |why| format!("mount {}: {why}", path.display());
        std::fs::create_dir_all(path).map_err(|why| refuse(why.to_string()))?;
        let fuse = OpenOptions::new().read(true).write(true).open("/dev/fuse");
        let fuse = fuse.map_err(|why| refuse(format!("open /dev/fuse: {why}")))?;
        for _ in 0..THREADS {
            let fuse = fuse.try_clone().map_err(|why| refuse(why.to_string()))?;
            let disks = disks.clone();
            let name = format!("disk-{disk}");
            let thread = std::thread::Builder::new().name(name);
            let started = thread.spawn(move || turn(&disks, disk, fuse));
            started.map_err(|why| refuse(why.to_string()))?;
        }
        // The mount command inherits the descriptor as its standard input (fd=0).
        let mut mount = Command::new("mount");
        mount.args(["--internal-only", "-t", "fuse", "-o"]);
        mount.arg("fd=0,rootmode=40000,user_id=0,group_id=0,nosuid,nodev");
        mount.arg("tenmil-crash").arg(path).stdin(Stdio::from(fuse));
        let output = mount.output().map_err(|why| refuse(why.to_string()))?;
        if !output.status.success() {
            return Err(refuse(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
        }
        Ok(Self { path: path.to_owned() })
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.path).status();
    }
}

fn turn(disks: &Shared, disk: usize, mut fuse: File) {
    let mut bytes = vec![0; WRITE_BYTES_MAX + (64 << 10)];
    loop {
        match fuse.read(&mut bytes) {
            Ok(len) => {
                if let Some(answer) = serve(disks, disk, &bytes[..len]) {
                    // If the calling process was killed, the kernel discards the reply.
                    let _ = fuse.write(&answer);
                }
            }
            // ENODEV: unmounted. ENOENT: the request was interrupted. EPERM: not mounted yet.
            Err(why) if why.raw_os_error() == Some(19) => return,
            Err(why) if why.raw_os_error() == Some(1) => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Disks, Keep, Trap, TrapPoint};

    #[test]
    fn a_disk_loses_data_at_a_sync_that_fails_and_at_no_other_time() {
        let mut disks = Disks::new(1, 1, false);
        let node = disks.disks[0].medium.create("disk");
        let write = |disks: &mut Disks, byte: u8| {
            let file = disks.disks[0].medium.file(node).expect("it was created");
            file.truncate(4096);
            file.write(0, &[byte; 4096]);
        };
        write(&mut disks, 1);
        assert!(disks.sync(0, node).is_ok());
        write(&mut disks, 2);
        let (moment, keep) = (TrapPoint::FailedSync, Keep::Nothing);
        disks.arm(vec![Trap { disk: 0, at: 9, moment, kill: vec![], lose: vec![0], keep }]);
        assert_eq!(disks.fire_all(), 1);
        assert_eq!(disks.content(0, "disk"), [2; 4096]);
        assert!(disks.fired.is_empty());
        assert!(disks.sync(0, node).is_err());
        assert_eq!((disks.content(0, "disk"), disks.fired.len()), (vec![1; 4096], 1));
        assert!(disks.sync(0, node).is_ok(), "once");
    }
}
