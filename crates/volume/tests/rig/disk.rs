//! Sparse device that models what reads see, what is durable, and what may or may not have reached the
//! medium.

use std::collections::BTreeMap;
use std::sync::Arc;

use tenmil_base::Random;

pub type Shared = Arc<[u8; 4096]>;
pub type Image = BTreeMap<u64, Shared>;

pub static ZEROES: [u8; 4096] = [0; 4096];

/// The device, or several that are concatenated, each of which loses power by itself.
pub struct Disk {
    now: Image,
    stable: Image,
    volatile: Vec<Volatile>,
    /// Time at which each was issued, and number of devices that have done it.
    flushes: BTreeMap<u64, (u64, u64)>,
    /// Starts of runs of blocks on another device than the previous ones, and that device.
    pub runs: Vec<(u64, u32)>,
    clock: u64,
    pub writes: u64,
    /// Completed writes were lost, and no flush has reported it yet.
    pub has_lost: bool,
}

/// Write of one block that no flush has made durable.
struct Volatile {
    io: u64,
    at: u64,
    block: Shared,
    ended: Option<u64>,
}

/// Effect of a power loss on unflushed writes.
#[derive(Clone, Copy, Debug)]
pub enum Cut {
    /// All completed writes are present, and nothing else.
    AsSeen,
    /// No unflushed write is present.
    Nothing,
    /// A random subset, in random order, with torn sectors.
    Random,
}

/// A block whose sectors contain a value and their own place; all zeroes for zero.
pub fn stamped(value: u64) -> Shared {
    let mut block = [0; 4096];
    if value != 0 {
        for (index, sector) in (1_u64..).zip(block.chunks_exact_mut(512)) {
            sector[..8].copy_from_slice(&value.to_le_bytes());
            sector[8..16].copy_from_slice(&index.to_le_bytes());
            sector[504..].copy_from_slice(&(value ^ index).to_le_bytes());
        }
    }
    block.into()
}

/// The value in each sector of a block.
pub fn values(block: &[u8; 4096]) -> [u64; 8] {
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
    let mut values = [0; 8];
    for (index, sector) in block.chunks_exact(512).enumerate() {
        let (value, place) = (word(&sector[..8]), index as u64 + 1);
        let is_whole = word(&sector[8..16]) == place && word(&sector[504..]) == value ^ place;
        let is_zero = sector.iter().all(|byte| *byte == 0);
        values[index] = if is_whole || is_zero { value } else { u64::MAX - 1 };
    }
    values
}

impl Disk {
    pub fn new(image: Image) -> Self {
        Self {
            now: image.clone(),
            stable: image,
            volatile: Vec::new(),
            flushes: BTreeMap::new(),
            runs: Vec::new(),
            clock: 0,
            writes: 0,
            has_lost: false,
        }
    }

    /// The same device after its writer was killed: reads see `image`, and a power loss may still take
    /// everything that was not flushed.
    pub fn unflushed(&self, image: Image) -> Self {
        let is_new = |(at, block): &(&u64, &Shared)| self.stable.get(at) != Some(*block);
        let write = |(at, block): (&u64, &Shared)| Volatile {
            io: u64::MAX,
            at: *at,
            block: Arc::clone(block),
            ended: Some(0),
        };
        let volatile = image.iter().filter(is_new).map(write).collect();
        let (stable, runs) = (self.stable.clone(), self.runs.clone());
        Self { stable, volatile, runs, ..Self::new(image) }
    }

    /// Loses any subset of the completed writes without a later flush, and continues. I/O in flight ends
    /// normally; the remaining writes may be lost the next time.
    pub fn lose(&mut self, random: &mut Random) {
        let all = std::mem::take(&mut self.volatile);
        let (ended, begun) = all.into_iter().partition(|write| write.ended.is_some());
        self.volatile = ended;
        let image = if random.chance(1, 4) { self.stable.clone() } else { self.random_cut(random) };
        let mut after = self.unflushed(image);
        after.volatile.extend::<Vec<Volatile>>(begun);
        (after.clock, after.writes, after.has_lost) = (self.clock, self.writes, true);
        after.flushes = std::mem::take(&mut self.flushes);
        *self = after;
    }

    pub fn image(&self) -> &Image {
        &self.now
    }

    pub fn read(&self, at: u64) -> Shared {
        self.now.get(&at).cloned().unwrap_or_else(|| Arc::new(ZEROES))
    }

    /// Replaces the contents of a block, regardless of writes.
    pub fn put(&mut self, at: u64, block: Shared) {
        self.stable.insert(at, Arc::clone(&block));
        self.now.insert(at, block);
    }

    pub fn issue_write(&mut self, io: u64, at: u64, block: Shared) {
        self.writes += 1;
        self.volatile.push(Volatile { io, at, block, ended: None });
    }

    pub fn drop_write(&mut self, io: u64) {
        self.volatile.retain(|write| write.io != io || write.ended.is_some());
    }

    pub fn end_write(&mut self, io: u64) {
        self.clock += 1;
        for write in self.volatile.iter_mut().filter(|write| write.io == io) {
            write.ended = Some(self.clock);
            self.now.insert(write.at, Arc::clone(&write.block));
        }
    }

    pub fn issue_flush(&mut self, io: u64) {
        self.flushes.insert(io, (self.clock, 0));
    }

    /// Device of a block.
    fn device(&self, at: u64) -> u32 {
        let behind = self.runs.partition_point(|(begin, _)| *begin <= at);
        behind.checked_sub(1).map_or(0, |index| self.runs[index].1)
    }

    /// Number of devices.
    fn devices(&self) -> u64 {
        self.runs.iter().map(|(_, device)| u64::from(*device) + 1).max().unwrap_or(1)
    }

    /// One device has done a flush: writes completed on it when the flush was issued are durable; later
    /// ones may not be. Returns whether all devices have done it.
    pub fn end_flush(&mut self, io: u64) -> bool {
        let devices = self.devices();
        let (issued, done) = self.flushes.get_mut(&io).expect("a flush");
        let (issued, device) = (*issued, u32::try_from((*done + io) % devices).unwrap());
        *done += 1;
        let is_done = *done >= devices;
        if is_done {
            self.flushes.remove(&io);
        }
        let volatile = std::mem::take(&mut self.volatile);
        let is_safe = |write: &Volatile| {
            self.device(write.at) == device && write.ended.is_some_and(|at| at <= issued)
        };
        let (safe, left): (Vec<Volatile>, Vec<Volatile>) = volatile.into_iter().partition(is_safe);
        self.volatile = left;
        let mut safe: Vec<&Volatile> = safe.iter().collect();
        safe.sort_by_key(|write| write.ended);
        for write in safe {
            self.stable.insert(write.at, Arc::clone(&write.block));
        }
        is_done
    }

    /// Contents of the medium after a power loss now: `cut` on the first device, and random on each of
    /// the others.
    pub fn cut(&self, cut: Cut, random: &mut Random) -> Image {
        let mut image = self.cut_all(cut, random);
        for device in 1..self.devices() {
            let cut = [Cut::AsSeen, Cut::Nothing, Cut::Random, cut];
            let cut = cut[usize::try_from(random.below(4)).unwrap()];
            let own = |at: &u64| u64::from(self.device(*at)) == device;
            image.retain(|at, _| !own(at));
            image.extend(self.cut_all(cut, random).into_iter().filter(|(at, _)| own(at)));
        }
        image
    }

    fn cut_all(&self, cut: Cut, random: &mut Random) -> Image {
        match cut {
            Cut::AsSeen => self.now.clone(),
            Cut::Nothing => self.stable.clone(),
            Cut::Random => self.random_cut(random),
        }
    }

    fn random_cut(&self, random: &mut Random) -> Image {
        let mut image = self.stable.clone();
        let mut writes: Vec<&Volatile> = self.volatile.iter().collect();
        while !writes.is_empty() {
            let index = random.below(writes.len() as u64);
            let write = writes.swap_remove(usize::try_from(index).unwrap());
            let sectors = match random.below(3) {
                0 => 0,
                1 => 0xff,
                _ => random.below(256),
            };
            let mut block = image.get(&write.at).map_or(ZEROES, |block| **block);
            for sector in (0..8).filter(|sector| sectors >> sector & 1 == 1) {
                block[sector * 512..][..512].copy_from_slice(&write.block[sector * 512..][..512]);
            }
            image.insert(write.at, block.into());
        }
        image
    }
}
