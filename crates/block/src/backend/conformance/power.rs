//! Media that lose power, to stand other devices on: `power:stable`, `power:cached` and
//! `power:forgetful`, and as `power:file` the backend of files over a disk like that.
//!
//! ```text
//!   channel --submit--> under way --poll, at random--> cache --flush, forced--> stable
//!                            \_______________ power cut ______________/
//! ```
//!
//! A cut keeps what is stable, and of each sector of 512 bytes that is not any version since.

mod file;
mod sectors;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use base::{
    Answer, Answers, Backend, Durability, Flags, Instant, Limits, Medium, Operation, Outcome,
    Random, Request, Segment, Support, WakeSource,
};
use dma::Regions;

use self::file::CutFile;
use self::sectors::{SECTOR, Sectors};
use crate::backend::range::check;
use crate::{Kind, MediumError, Opened, Opener, uri::Uri};

/// A medium. Clones share the blocks.
#[derive(Clone)]
pub(super) struct Power {
    state: Arc<Mutex<State>>,
    limits: Limits,
}

/// Opens the media, and keeps a handle to each. Once they have been started again, the media that
/// there are come back in the order in which they were first opened.
#[derive(Default)]
pub(crate) struct PowerKind {
    media: Mutex<Vec<Lossy>>,
    /// How many of them have been opened since they had power again.
    opened: AtomicU64,
    countdown: Countdown,
}

/// Something that loses power.
#[derive(Clone)]
enum Lossy {
    Medium(Power),
    File(Arc<CutFile>),
}

/// How much may still be carried out, by all media together, before the power fails.
#[derive(Clone)]
struct Countdown(Arc<AtomicU64>);

struct State {
    regions: Regions,
    random: Random,
    sectors: Sectors,
    under_way: Vec<UnderWay>,
    is_powered: bool,
    channels: u32,
    durability: Durability,
    /// Says that it has flushed and has not: what a test has to notice.
    is_forgetful: bool,
    countdown: Countdown,
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

const BLOCK: u32 = 1024;
/// Blocks on each medium, unless its name says otherwise.
const BLOCKS: u64 = 128;

impl Kind for PowerKind {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<Opened, MediumError> {
        let mut fields = uri.fields();
        let blocks = fields.size("size")?.map_or(BLOCKS, |size| size / u64::from(BLOCK));
        let file = file::Options::of(&mut fields)?;
        fields.finish()?;
        let mut media = self.media.lock().unwrap();
        let number = usize::try_from(self.opened.fetch_add(1, Ordering::Relaxed)).unwrap();
        if number == media.len() {
            let seed = opener.seed ^ (number as u64) << 32;
            let countdown = self.countdown.clone();
            media.push(match uri.path() {
                "file" => Lossy::File(Arc::new(CutFile::new(seed, blocks, file, countdown))),
                path => Lossy::Medium(Power::new(opener.regions, path, blocks, seed, countdown)),
            });
        }
        let medium: Arc<dyn Medium> = match &media[number] {
            Lossy::Medium(power) => Arc::new(power.clone()),
            Lossy::File(file) => Arc::new(file.open(opener.regions)?),
        };
        Ok(Opened::fresh(medium, "power: loses it"))
    }
}

impl PowerKind {
    /// Lets so many requests and jobs be carried out, and no more before the power fails.
    pub(crate) fn cut_after(&self, count: u64) {
        self.countdown.0.store(count, Ordering::Relaxed);
    }

    /// Whether the countdown has ended.
    pub(crate) fn is_out(&self) -> bool {
        self.countdown.0.load(Ordering::Relaxed) == 0
    }

    /// How much has been carried out since the countdown was set to this.
    pub(super) fn done_of(&self, count: u64) -> u64 {
        count - self.countdown.0.load(Ordering::Relaxed)
    }

    /// All media lose power at the same moment.
    pub(crate) fn cut(&self) {
        for medium in &*self.media.lock().unwrap() {
            match medium {
                Lossy::Medium(power) => power.lock().cut(),
                Lossy::File(file) => file.cut(),
            }
        }
    }

    /// They have it again, and wait to be opened again.
    pub(crate) fn restore(&self) {
        self.cut_after(u64::MAX);
        self.opened.store(0, Ordering::Relaxed);
        for medium in &*self.media.lock().unwrap() {
            match medium {
                Lossy::Medium(power) => power.lock().is_powered = true,
                Lossy::File(file) => file.restore(),
            }
        }
    }
}

impl Countdown {
    /// Whether one more may be carried out.
    fn take(&self) -> bool {
        let less = |left: u64| left.checked_sub(1);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }
}

impl Default for Countdown {
    fn default() -> Self {
        Self(Arc::new(AtomicU64::new(u64::MAX)))
    }
}

impl Power {
    fn new(regions: &Regions, path: &str, blocks: u64, seed: u64, countdown: Countdown) -> Self {
        let durability = match path {
            "stable" => Durability::Stable,
            _ => Durability::VolatileCache,
        };
        let limits = Limits {
            block_size: BLOCK,
            metadata_size: 0,
            block_count: blocks,
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
            sectors: Sectors::default(),
            under_way: Vec::new(),
            is_powered: true,
            channels: 0,
            durability,
            is_forgetful: path == "forgetful",
            countdown,
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
            let is_mine = state.under_way[index].channel == self.number;
            if is_mine && state.random.chance(1, 3) && state.countdown.take() {
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

impl Drop for PowerChannel {
    /// What it has under way is done, and nobody hears of it: its memory goes.
    fn drop(&mut self) {
        let mut state = self.state.lock().unwrap();
        let all = std::mem::take(&mut state.under_way);
        let (mine, others): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|one| one.channel == self.number);
        state.under_way = others;
        if state.is_powered {
            mine.iter().for_each(|one| state.carry_out(one));
        }
    }
}

impl State {
    fn carry_out(&mut self, one: &UnderWay) {
        let Request { operation, flags, lba, blocks, .. } = one.request;
        let each = u64::from(BLOCK) / SECTOR as u64;
        let range = lba * each..(lba + u64::from(blocks)) * each;
        match operation {
            Operation::Read => self.sectors.read(range.start, &one.segments, &self.regions),
            Operation::Write => self.sectors.write(range.start, &gather(&self.regions, one)),
            Operation::WriteZeroes => {
                self.sectors.write(range.start, &vec![0; blocks as usize * BLOCK as usize]);
            }
            Operation::Flush if !self.is_forgetful => self.sectors.settle(0..u64::MAX, u64::MAX),
            _ => {}
        }
        let is_forced = flags.has(Flags::FUA) && !self.is_forgetful;
        if is_forced || self.durability == Durability::Stable {
            self.sectors.settle(range, u64::MAX);
        }
    }

    fn cut(&mut self) {
        self.is_powered = false;
        for one in std::mem::take(&mut self.under_way) {
            // What was under way may have got into the cache, or some of it.
            if one.request.operation == Operation::Write && self.random.chance(1, 2) {
                let bytes = gather(&self.regions, &one);
                let len = usize::try_from(self.random.below(bytes.len() as u64 + 1)).unwrap();
                let first = one.request.lba * u64::from(BLOCK) / SECTOR as u64;
                self.sectors.write(first, &bytes[..len]);
            }
        }
        self.sectors.cut(&mut self.random);
    }
}

fn gather(regions: &Regions, one: &UnderWay) -> Vec<u8> {
    sectors::gather(regions, &one.segments)
}
