//! A sparse device: what reads see, what survives, and what may or may not have reached the medium.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::Random;

pub type Shared = Arc<[u8; 4096]>;
pub type Image = BTreeMap<u64, Shared>;

pub static ZEROES: [u8; 4096] = [0; 4096];

/// The device, or several whose blocks run through them end to end, and which lose power each by itself.
pub struct Disk {
    now: Image,
    stable: Image,
    volatile: Vec<Volatile>,
    /// When each was issued, and by how many devices it has been done.
    flushes: BTreeMap<u64, (u64, u64)>,
    /// Where runs of blocks begin that lie on another device than those before, and on which.
    pub runs: Vec<(u64, u32)>,
    clock: u64,
    pub writes: u64,
    /// Completed writes were lost, and no flush has said so yet.
    pub has_lost: bool,
}

/// A write of one block that no flush has made survive.
struct Volatile {
    io: u64,
    at: u64,
    block: Shared,
    ended: Option<u64>,
}

/// What a cut of the power does to writes that were not flushed.
#[derive(Clone, Copy, Debug)]
pub enum Cut {
    /// All that was completed is there, and nothing else.
    AsSeen,
    /// Nothing is there that was not flushed.
    Nothing,
    /// A random subset, in a random order, with torn sectors.
    Random,
}

/// A block of which every sector bears a value and its own place; all zeroes for zero.
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

/// The value that each sector of a block bears.
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

    /// The same device, seen by the next program after the one that wrote was killed: reads see
    /// `image`, and a loss of power may still take all of it that was not flushed.
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

    /// Any subset of the completed writes that no flush has followed is lost, and the device goes on. What
    /// is under way ends as ever; what is left may be lost as well the next time.
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

    /// What is there is something else from now on, whatever was written.
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

    /// On which device a block is.
    fn device(&self, at: u64) -> u32 {
        let behind = self.runs.partition_point(|(begin, _)| *begin <= at);
        behind.checked_sub(1).map_or(0, |index| self.runs[index].1)
    }

    /// How many devices there are.
    fn devices(&self) -> u64 {
        self.runs.iter().map(|(_, device)| u64::from(*device) + 1).max().unwrap_or(1)
    }

    /// One device has done a flush: what had been completed on it when that was issued survives; what came
    /// later may not. Whether all have.
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

    /// What is on the medium if the power fails now: on the first device as is said, on each of the others
    /// as may be.
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
