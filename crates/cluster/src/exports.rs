//! Exports of a process: disks, and mirrors of disks.

use std::sync::Arc;

use tenmil_base::{BlockDevice, CompletionBatch, Durability, Error, Instant, IoChannel, Span};
use tenmil_block::{Bdev, BdevOptions, Claim};
use tenmil_dma::RegionTable;
use tenmil_drivers::Mirror;
use tenmil_drivers::mirror::{MirrorLegDevice, MirrorOptions};
use tenmil_linux::Clock;

use crate::injected_bugs::InjectedBugs;
use crate::sim_disk::SimDisk;

/// An exported namespace.
pub(crate) struct SimExport {
    /// Namespace identifier.
    pub(crate) nsid: u32,
    /// Global number, from which its UUID is derived.
    pub(crate) number: usize,
    /// Location of its blocks.
    pub(crate) blocks: ExportBlocks,
}

/// Location of the blocks of a namespace.
pub(crate) enum ExportBlocks {
    /// A disk.
    Disk(SimDisk),
    /// A mirror of several disks.
    Mirror(Vec<SimDisk>),
}

/// Context in which a process opens its exports.
pub(crate) struct ExportOpener<'a> {
    /// Number of the incarnation of the process.
    pub(crate) process: u64,
    /// Region table of the process.
    pub(crate) regions: &'a RegionTable,
    /// Injected bugs.
    pub(crate) bugs: InjectedBugs,
    /// Time, which advances while a mirror reads and writes its superblocks.
    pub(crate) now: Instant,
}

/// Channel that is polled in the background of an export.
pub(crate) type BackgroundChannel = Box<dyn IoChannel>;

/// Time step while waiting for a disk.
const POLL_INTERVAL: Span = Span::from_us(10);

impl ExportOpener<'_> {
    /// Opens an export, and the background channel it needs, if any.
    pub(crate) fn open_export(
        &mut self,
        blocks: &ExportBlocks,
    ) -> Result<(Arc<dyn BlockDevice>, Option<BackgroundChannel>), String> {
        match blocks {
            ExportBlocks::Disk(disk) => Ok((
                bdev_over(Arc::new(self.open_disk(disk))).map_err(|error| error.to_string())?,
                None,
            )),
            ExportBlocks::Mirror(disks) => {
                let legs = self.mirror_legs(disks);
                let mut options = MirrorOptions::default();
                options.bugs.starts_without_legs = self.bugs.mirror_starts_from_stale_leg;
                let mirror =
                    Mirror::open(self.regions, &legs, &options, &mut stepping_clock(&mut self.now));
                let mirror = Arc::new(mirror.map_err(|error| error.to_string())?);
                let background = mirror.channel().map_err(|error| error.to_string())?;
                Ok((bdev_over(mirror).map_err(|error| error.to_string())?, Some(background)))
            }
        }
    }

    /// Creates a mirror on empty disks.
    pub(crate) fn create_mirror(&mut self, disks: &[SimDisk], uuid: u128) -> Result<(), String> {
        let legs = self.mirror_legs(disks);
        Mirror::write_new_superblocks(self.regions, &legs, uuid, &mut stepping_clock(&mut self.now))
            .map(|_| ())
            .map_err(|error| error.to_string())
    }

    fn mirror_legs(&self, disks: &[SimDisk]) -> Vec<MirrorLegDevice> {
        let leg = |(index, disk): (usize, &SimDisk)| {
            let medium: Result<Arc<dyn BlockDevice>, Error> = match disk.is_absent() {
                true => Err(Error::environment(format!("disk {index} is not there"))),
                false => Ok(Arc::new(self.open_disk(disk))),
            };
            MirrorLegDevice { name: format!("disk {index}"), medium }
        };
        disks.iter().enumerate().map(leg).collect()
    }

    fn open_disk(&self, disk: &SimDisk) -> crate::sim_disk::SimDiskOfProcess {
        let durability = match self.bugs.cached_disk_is_stable {
            true => Durability::Persistent,
            false => Durability::VolatileCache,
        };
        disk.open(self.process, self.regions, durability)
    }
}

/// Polls all background channels.
pub(crate) fn poll_background(background: &mut [BackgroundChannel], now: Instant) {
    let mut completions = CompletionBatch::with_capacity(1);
    for channel in background {
        channel.poll(now, &mut completions);
    }
}

fn stepping_clock(now: &mut Instant) -> impl FnMut() -> Instant {
    || {
        *now = now.after(POLL_INTERVAL);
        *now
    }
}

/// Wraps a block device in the block layer, as a service expects.
fn bdev_over(medium: Arc<dyn BlockDevice>) -> Result<Arc<dyn BlockDevice>, Error> {
    // Timing would use the real clock and is not needed.
    let options = BdevOptions { timing: false, ..BdevOptions::new(Clock::start(), 1) };
    let device = Bdev::new("disk", medium, options).map_err(Error::environment)?;
    let descriptor = device.open(Claim::WriteOnce, "target").map_err(Error::environment)?;
    Ok(Arc::new(descriptor))
}
