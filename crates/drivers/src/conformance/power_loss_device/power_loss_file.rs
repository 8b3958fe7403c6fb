//! A file on a disk that loses power: the unmodified backend of files, with jobs for a simulated disk and
//! page cache instead of the kernel.
//!
//! The jobs guarantee what the kernel guarantees and no more. A completed write is in the page cache, and
//! also stable if that was requested; a sync makes the writes stable that had completed before its
//! submission; holes and zeroes are metadata, and equally volatile. A created or extended file has its
//! length only once something in it is stable.

use std::sync::{Arc, Mutex, MutexGuard};

use tenmil_base::{BlockDevice, IoChannel, Limits, Random, Segment, WakeSource};
use tenmil_dma::RegionTable;
use tenmil_linux::Errno;
use tenmil_linux::file_engine::{EngineChoice, FileOp, JobCompletion, SubmitError};
use tenmil_linux::storage_file::{BufferedReason, DirectIoAlignment};

use super::sectors::{CachedSectors, SECTOR, segment_bytes};
use super::{BLOCK, PowerLossCountdown};
use crate::file::{FileDevice, FileDeviceOptions, FileIo};
use tenmil_base::Error;
use tenmil_block::uri::{UriError, UriOptions};

/// The disk, and the path of a file of the same length that is never written.
pub(super) struct PowerLossFile {
    directory: tempfile::TempDir,
    blocks: u64,
    options: PowerLossFileOptions,
    disk: SimulatedDisk,
}

/// Capabilities of the file system, and those that it only claims.
#[derive(Clone, Copy, Debug)]
pub(super) struct PowerLossFileOptions {
    /// Aligned transfers bypass the page cache.
    direct: bool,
    holes: bool,
    zeroes: bool,
    /// Whether a sync has an effect; without one, a test must fail.
    syncs: bool,
    /// The same for writes that must be stable.
    forces: bool,
}

/// The device of one life.
struct FileDeviceUntilPowerLoss {
    medium: FileDevice,
    disk: SimulatedDisk,
    regions: RegionTable,
}

/// Jobs of a channel.
#[derive(Debug)]
struct SimulatedDiskEngine {
    disk: SimulatedDisk,
    regions: RegionTable,
    channel: u32,
}

#[derive(Clone)]
struct SimulatedDisk(Arc<Mutex<SimulatedDiskState>>);

struct SimulatedDiskState {
    sectors: CachedSectors,
    random: Random,
    under_way: Vec<InFlightJob>,
    channels: u32,
    is_powered: bool,
    /// Whether the file would have its length and its name after a power failure.
    is_sized: bool,
    options: PowerLossFileOptions,
    countdown: PowerLossCountdown,
}

struct InFlightJob {
    channel: u32,
    token: u64,
    what: JobKind,
    regions: RegionTable,
}

enum JobKind {
    Read {
        first: u64,
        into: Vec<Segment>,
    },
    Write {
        first: u64,
        from: Vec<Segment>,
        stable: bool,
    },
    /// Covers all writes up to this number.
    Sync {
        writes: u64,
    },
    Zero {
        first: u64,
        count: usize,
        is_possible: bool,
    },
}

impl PowerLossFileOptions {
    pub(super) fn parse(fields: &mut UriOptions<'_>) -> Result<Self, UriError> {
        let mut choice = |name| fields.choice_value(name, &[("yes", true), ("no", false)]);
        Ok(Self {
            direct: choice("direct")?.unwrap_or(true),
            holes: choice("holes")?.unwrap_or(true),
            zeroes: choice("zeroes")?.unwrap_or(true),
            syncs: choice("syncs")?.unwrap_or(true),
            forces: choice("forces")?.unwrap_or(true),
        })
    }

    fn direct_io_alignment(self) -> Result<DirectIoAlignment, BufferedReason> {
        let alignment = DirectIoAlignment { memory_bytes: 4096, offset_bytes: 512 };
        if self.direct { Ok(alignment) } else { Err(BufferedReason::Requested) }
    }
}

impl PowerLossFile {
    pub(super) fn new(
        seed: u64,
        blocks: u64,
        options: PowerLossFileOptions,
        countdown: PowerLossCountdown,
    ) -> Self {
        let state = SimulatedDiskState {
            sectors: CachedSectors::default(),
            random: Random::new(seed),
            under_way: Vec::new(),
            channels: 0,
            is_powered: true,
            is_sized: false,
            options,
            countdown,
        };
        let disk = SimulatedDisk(Arc::new(Mutex::new(state)));
        Self { directory: tempfile::tempdir().unwrap(), blocks, options, disk }
    }

    pub(super) fn open(&self, regions: &RegionTable) -> Result<impl BlockDevice + use<>, Error> {
        let medium = FileDevice::open_with_alignment(
            regions,
            &FileDeviceOptions {
                path: self.directory.path().join("blocks"),
                size_bytes: Some(self.blocks * u64::from(BLOCK)),
                block_size: BLOCK,
                direct: self.options.direct,
                read_only: false,
                engine: EngineChoice::Threads,
            },
            self.options.direct_io_alignment(),
        )?;
        Ok(FileDeviceUntilPowerLoss { medium, disk: self.disk.clone(), regions: regions.clone() })
    }

    pub(super) fn lose_power(&self) {
        self.disk.lock().lose_power();
    }

    pub(super) fn restore_power(&self) {
        self.disk.lock().is_powered = true;
    }
}

impl BlockDevice for FileDeviceUntilPowerLoss {
    fn limits(&self) -> Limits {
        // The location of the real file does not matter.
        Limits { durability: tenmil_base::Durability::VolatileCache, ..self.medium.limits() }
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let mut state = self.disk.lock();
        state.channels += 1;
        let (disk, regions) = (self.disk.clone(), self.regions.clone());
        self.medium.open_channel_with_engine(SimulatedDiskEngine {
            disk,
            regions,
            channel: state.channels,
        })
    }
}

impl FileIo for SimulatedDiskEngine {
    fn submit(&mut self, token: u64, job: FileOp<'_>) -> Result<(), SubmitError> {
        let mut state = self.disk.lock();
        let sector = |offset: u64| offset / SECTOR as u64;
        let sectors = |len_bytes: u64| usize::try_from(sector(len_bytes)).unwrap();
        let PowerLossFileOptions { holes, zeroes, .. } = state.options;
        let what = match job {
            FileOp::Read { offset, into } => {
                JobKind::Read { first: sector(offset), into: into.into() }
            }
            FileOp::Write { offset, from, fua: stable } => {
                JobKind::Write { first: sector(offset), from: from.into(), stable }
            }
            FileOp::Sync => JobKind::Sync { writes: state.sectors.write_count() },
            FileOp::PunchHole { offset, len_bytes } => {
                let (first, count) = (sector(offset), sectors(len_bytes));
                JobKind::Zero { first, count, is_possible: holes }
            }
            FileOp::ZeroRange { offset, len_bytes } => {
                let (first, count) = (sector(offset), sectors(len_bytes));
                JobKind::Zero { first, count, is_possible: zeroes }
            }
        };
        let (channel, regions) = (self.channel, self.regions.clone());
        state.under_way.push(InFlightJob { channel, token, what, regions });
        Ok(())
    }

    fn flush_submissions(&mut self) {}

    fn poll(&mut self, ended: &mut Vec<JobCompletion>) {
        let mut state = self.disk.lock();
        let mut index = 0;
        while state.is_powered && index < state.under_way.len() {
            let is_mine = state.under_way[index].channel == self.channel;
            if is_mine && state.random.chance(1, 3) && state.countdown.try_consume_operation() {
                let one = state.under_way.swap_remove(index);
                ended.push(JobCompletion { token: one.token, result: state.execute_job(&one) });
            } else {
                index += 1;
            }
        }
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::None
    }

    fn arm(&mut self) -> bool {
        false
    }

    fn disarm(&mut self) {}

    fn has_unsubmitted(&self) -> bool {
        false
    }
}

impl Drop for SimulatedDiskEngine {
    /// Like the engine of the kernel, it executes jobs whether their completion is delivered or not.
    fn drop(&mut self) {
        let mut state = self.disk.lock();
        let (mine, others) = std::mem::take(&mut state.under_way)
            .into_iter()
            .partition(|one: &InFlightJob| one.channel == self.channel);
        state.under_way = others;
        let mine: Vec<InFlightJob> = mine;
        for one in mine {
            if state.is_powered {
                let _ = state.execute_job(&one);
            }
        }
    }
}

impl SimulatedDisk {
    fn lock(&self) -> MutexGuard<'_, SimulatedDiskState> {
        self.0.lock().unwrap()
    }
}

impl std::fmt::Debug for SimulatedDisk {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Disk")
    }
}

impl SimulatedDiskState {
    fn execute_job(&mut self, one: &InFlightJob) -> Result<(), Errno> {
        match &one.what {
            JobKind::Read { first, into } => self.sectors.read(*first, into, &one.regions),
            JobKind::Write { first, from, stable } => {
                let bytes = segment_bytes(&one.regions, from);
                self.sectors.write(*first, &bytes);
                if *stable && self.options.forces {
                    let end = first + (bytes.len() / SECTOR) as u64;
                    self.sectors.persist_up_to(*first..end, u64::MAX);
                    self.is_sized = true;
                }
            }
            JobKind::Sync { writes } if self.options.syncs => {
                self.sectors.persist_up_to(0..u64::MAX, *writes);
                self.is_sized = true;
            }
            JobKind::Sync { .. } => {}
            JobKind::Zero { is_possible: false, .. } => return Err(Errno::OPNOTSUPP),
            JobKind::Zero { first, count, .. } => {
                self.sectors.write(*first, &vec![0; count * SECTOR]);
            }
        }
        Ok(())
    }

    fn lose_power(&mut self) {
        self.is_powered = false;
        for one in std::mem::take(&mut self.under_way) {
            // A job in flight may have reached the page cache, or a part of it.
            let (first, bytes) = match &one.what {
                JobKind::Write { first, from, .. } => (*first, segment_bytes(&one.regions, from)),
                JobKind::Zero { first, count, is_possible: true } => {
                    (*first, vec![0; count * SECTOR])
                }
                _ => continue,
            };
            let len = usize::try_from(self.random.below(bytes.len() as u64 + 1)).unwrap();
            self.sectors.write(first, &bytes[..len]);
        }
        if !self.is_sized && self.random.chance(1, 2) {
            // The file itself is missing: it is created again when it is opened.
            self.sectors = CachedSectors::default();
        }
        self.sectors.drop_cached_randomly(&mut self.random);
    }
}
