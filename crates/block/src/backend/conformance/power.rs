//! A medium that loses power, to stand other devices on.
//!
//! ```text
//!   channel --submit--> under way --poll, at random--> cache --flush, forced--> stable
//!                            \_______________ power cut ______________/
//! ```
//!
//! A cut keeps what is stable, and of each sector of 512 bytes that is not any version since.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use base::{
    Answer, Answers, Backend, Durability, Flags, Instant, Limits, Medium, Memory, Operation,
    Outcome, Random, Request, Segment, Support, WakeSource,
};
use dma::Regions;

use crate::backend::pieces::Pieces;
use crate::backend::range::check;
use crate::{Kind, MediumError, Opened, Opener, uri::Uri};

/// A medium. Clones share the blocks.
#[derive(Clone)]
pub(super) struct Power {
    state: Arc<Mutex<State>>,
    limits: Limits,
}

/// Opens `power:stable`, `power:cached` or `power:forgetful`, and keeps a handle to each.
#[derive(Default)]
pub(super) struct PowerKind(Mutex<Vec<Power>>);

struct State {
    regions: Regions,
    random: Random,
    /// Sectors that were never written are zeroes.
    stable: BTreeMap<u64, Sector>,
    /// What was written since, oldest first.
    cached: BTreeMap<u64, Vec<Sector>>,
    under_way: Vec<UnderWay>,
    is_powered: bool,
    channels: u32,
    durability: Durability,
    /// Says that it has flushed and has not: what a test has to notice.
    is_forgetful: bool,
}

struct UnderWay {
    channel: u32,
    request: Request,
    segments: Vec<Segment>,
}

struct PowerChannel {
    state: Arc<Mutex<State>>,
    limits: Limits,
    number: u32,
}

type Sector = [u8; SECTOR as usize];

const SECTOR: u32 = 512;
const BLOCK: u32 = 1024;
/// Blocks on each medium.
const BLOCKS: u64 = 128;

impl Kind for PowerKind {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<Opened, MediumError> {
        let durability = match uri.path() {
            "stable" => Durability::Stable,
            _ => Durability::VolatileCache,
        };
        let mut all = self.0.lock().unwrap();
        let seed = opener.seed ^ (all.len() as u64) << 32;
        let power = Power::new(opener.regions, durability, uri.path() == "forgetful", seed);
        all.push(power.clone());
        Ok(Opened::fresh(Arc::new(power), "power: loses it"))
    }
}

impl PowerKind {
    /// All media lose power at the same moment.
    pub(super) fn cut(&self) {
        self.0.lock().unwrap().iter().for_each(|medium| medium.lock().cut());
    }

    /// They have it again.
    pub(super) fn restore(&self) {
        self.0.lock().unwrap().iter().for_each(|medium| medium.lock().is_powered = true);
    }
}

impl Power {
    fn new(regions: &Regions, durability: Durability, is_forgetful: bool, seed: u64) -> Self {
        let limits = Limits {
            block_size: BLOCK,
            metadata_size: 0,
            block_count: BLOCKS,
            request_blocks_max: 64,
            segments_max: 16,
            optimal_boundary_blocks: 0,
            atomic_write_blocks: 1,
            depth_max: 16,
            durability,
            support: Support::of(&[
                Operation::Read,
                Operation::Write,
                Operation::Flush,
                Operation::WriteZeroes,
                Operation::Verify,
            ]),
        };
        let state = State {
            regions: regions.clone(),
            random: Random::new(seed),
            stable: BTreeMap::new(),
            cached: BTreeMap::new(),
            under_way: Vec::new(),
            is_powered: true,
            channels: 0,
            durability,
            is_forgetful,
        };
        Self { state: Arc::new(Mutex::new(state)), limits }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

impl Medium for Power {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        let mut state = self.lock();
        state.channels += 1;
        let (number, limits) = (state.channels, self.limits.clone());
        Ok(Box::new(PowerChannel { state: Arc::clone(&self.state), limits, number }))
    }
}

impl Backend for PowerChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, _now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let mut state = self.state.lock().unwrap();
        if !state.is_powered {
            return 0;
        }
        let mine = state.under_way.iter().filter(|one| one.channel == self.number).count();
        let taken = requests.len().min(self.limits.depth_max as usize - mine);
        for request in &requests[..taken] {
            let own = check(&self.limits, request, segments).unwrap().to_vec();
            let one = UnderWay { channel: self.number, request: *request, segments: own };
            state.under_way.push(one);
        }
        taken
    }

    fn poll(&mut self, _now: Instant, answers: &mut Answers) -> usize {
        let mut state = self.state.lock().unwrap();
        let before = answers.room();
        let mut index = 0;
        while state.is_powered && answers.room() > 0 && index < state.under_way.len() {
            if state.under_way[index].channel == self.number && state.random.chance(1, 3) {
                let one = state.under_way.swap_remove(index);
                state.carry_out(&one);
                let (token, outcome) = (one.request.token, Outcome::SUCCESS);
                answers.push(Answer { token, outcome, result: 0 });
            } else {
                index += 1;
            }
        }
        before - answers.room()
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Nothing
    }
}

impl State {
    fn carry_out(&mut self, one: &UnderWay) {
        let Request { operation, flags, lba, blocks, .. } = one.request;
        let each = u64::from(BLOCK / SECTOR);
        let sectors = lba * each..(lba + u64::from(blocks)) * each;
        match operation {
            Operation::Read => self.read(sectors.start, &one.segments),
            Operation::Write => self.write(sectors.start, &self.gather(one)),
            Operation::WriteZeroes => {
                let zeroes = vec![0; blocks as usize * BLOCK as usize];
                self.write(sectors.start, &zeroes);
            }
            Operation::Flush if !self.is_forgetful => self.settle(0..u64::MAX),
            _ => {}
        }
        let is_forced = flags.has(Flags::FUA) && !self.is_forgetful;
        if is_forced || self.durability == Durability::Stable {
            self.settle(sectors);
        }
    }

    fn read(&self, first: u64, segments: &[Segment]) {
        let mut pieces = Pieces::of(segments);
        let mut skip = 0;
        while let Some(piece) = pieces.take((SECTOR - skip % SECTOR).into()) {
            let newest = self.newest(first + u64::from(skip / SECTOR));
            let from = (skip % SECTOR) as usize;
            self.regions.store(piece, &newest[from..from + piece.len_bytes as usize]).unwrap();
            skip += piece.len_bytes;
        }
    }

    fn newest(&self, sector: u64) -> Sector {
        let cached = self.cached.get(&sector).and_then(|versions| versions.last());
        *cached.or_else(|| self.stable.get(&sector)).unwrap_or(&[0; SECTOR as usize])
    }

    fn gather(&self, one: &UnderWay) -> Vec<u8> {
        let mut bytes = Vec::new();
        for segment in &one.segments {
            let from = bytes.len();
            bytes.resize(from + segment.len_bytes as usize, 0);
            self.regions.load(*segment, &mut bytes[from..]).unwrap();
        }
        bytes
    }

    fn write(&mut self, first: u64, bytes: &[u8]) {
        for (sector, bytes) in (first..).zip(bytes.chunks_exact(SECTOR as usize)) {
            self.cached.entry(sector).or_default().push(bytes.try_into().unwrap());
        }
    }

    /// Makes the newest versions stable.
    fn settle(&mut self, sectors: std::ops::Range<u64>) {
        let settled: Vec<u64> = self.cached.range(sectors).map(|(sector, _)| *sector).collect();
        for sector in settled {
            let newest = self.newest(sector);
            self.cached.remove(&sector);
            self.stable.insert(sector, newest);
        }
    }

    fn cut(&mut self) {
        self.is_powered = false;
        for one in std::mem::take(&mut self.under_way) {
            // What was under way may have got into the cache, or some of it.
            if one.request.operation == Operation::Write && self.random.chance(1, 2) {
                let bytes = self.gather(&one);
                let len = usize::try_from(self.random.below(bytes.len() as u64 + 1)).unwrap();
                self.write(one.request.lba * u64::from(BLOCK / SECTOR), &bytes[..len]);
            }
        }
        for (sector, versions) in std::mem::take(&mut self.cached) {
            let survivor = usize::try_from(self.random.below(versions.len() as u64 + 1)).unwrap();
            if let Some(survivor) = versions.get(survivor) {
                self.stable.insert(sector, *survivor);
            }
        }
    }
}
