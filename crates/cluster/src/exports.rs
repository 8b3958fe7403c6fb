//! What a process serves: disks, and mirrors of them.

use std::sync::Arc;

use base::{Answers, Backend, Durability, Instant, Medium, Span};
use block::mirror::{Leg, MirrorOptions};
use block::{Claim, Device, DeviceOptions, Mirror};
use dma::Regions;
use host::Clock;

use crate::bugs::InjectedBugs;
use crate::disk::Disk;

/// A namespace.
pub(crate) struct Export {
    /// Its identifier.
    pub(crate) nsid: u32,
    /// Its number among all: by it hosts recognize it.
    pub(crate) number: usize,
    /// Where its blocks are.
    pub(crate) blocks: Blocks,
}

/// Where the blocks of a namespace are.
pub(crate) enum Blocks {
    /// On a disk.
    Disk(Disk),
    /// On each of several.
    Mirror(Vec<Disk>),
}

/// How a process opens what it serves.
pub(crate) struct Opening<'a> {
    /// Which life of which process it is.
    pub(crate) process: u64,
    /// Its memory.
    pub(crate) regions: &'a Regions,
    /// What is wrong on purpose.
    pub(crate) bugs: InjectedBugs,
    /// The time, which goes on while a mirror reads and writes its superblocks.
    pub(crate) now: Instant,
}

/// What is turned while it is served.
pub(crate) type Background = Box<dyn Backend>;

/// How far time goes on between two looks at a disk.
const LOOK: Span = Span::from_us(10);

impl Opening<'_> {
    /// Opens what an export names, and what has to be turned with it.
    pub(crate) fn open(
        &mut self,
        blocks: &Blocks,
    ) -> Result<(Arc<dyn Medium>, Option<Background>), String> {
        match blocks {
            Blocks::Disk(disk) => Ok((device(Arc::new(self.disk(disk)))?, None)),
            Blocks::Mirror(disks) => {
                let legs = self.legs(disks);
                let mut options = MirrorOptions::default();
                options.bugs.starts_without_legs = self.bugs.mirror_starts_from_stale_leg;
                let mirror = Mirror::open(self.regions, &legs, &options, &mut clock(&mut self.now));
                let mirror = Arc::new(mirror?);
                let background = mirror.channel()?;
                Ok((device(mirror)?, Some(background)))
            }
        }
    }

    /// Makes a mirror of disks that hold nothing.
    pub(crate) fn format(&mut self, disks: &[Disk], uuid: u128) -> Result<(), String> {
        let legs = self.legs(disks);
        Mirror::format(self.regions, &legs, uuid, &mut clock(&mut self.now)).map(|_| ())
    }

    fn legs(&self, disks: &[Disk]) -> Vec<Leg> {
        let leg = |(index, disk): (usize, &Disk)| {
            let medium: Result<Arc<dyn Medium>, String> = match disk.is_absent() {
                true => Err(format!("disk {index} is not there")),
                false => Ok(Arc::new(self.disk(disk))),
            };
            Leg { name: format!("disk {index}"), medium }
        };
        disks.iter().enumerate().map(leg).collect()
    }

    fn disk(&self, disk: &Disk) -> crate::disk::OpenDisk {
        let durability = match self.bugs.cached_disk_is_stable {
            true => Durability::Stable,
            false => Durability::VolatileCache,
        };
        disk.open(self.process, self.regions, durability)
    }
}

/// Does what has to be done in the background.
pub(crate) fn turn(background: &mut [Background], now: Instant) {
    let mut answers = Answers::with_capacity(1);
    for channel in background {
        channel.poll(now, &mut answers);
    }
}

fn clock(now: &mut Instant) -> impl FnMut() -> Instant {
    || {
        *now = now.after(LOOK);
        *now
    }
}

/// A medium as the block device that a service is given.
fn device(medium: Arc<dyn Medium>) -> Result<Arc<dyn Medium>, String> {
    // Its clock measures waits that nobody asks for here.
    let options = DeviceOptions { timing: false, ..DeviceOptions::new(Clock::start(), 1) };
    let device = Device::new("disk", medium, options).map_err(|why| why.to_string())?;
    let descriptor = device.open(Claim::WriteOnce, "target").map_err(|why| why.to_string())?;
    Ok(Arc::new(descriptor))
}
