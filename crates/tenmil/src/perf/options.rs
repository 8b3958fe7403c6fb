//! What a run of `perf` is asked to do: plain values, checked before anything starts.

use base::Span;
use dma::CommandStore;
use host::Cores;
use host::machine::Machine;

use super::quantity::{parse_count, parse_size};
use crate::{EmuMedium, EmuSpec, Refused, Uri};

/// Everything the engine needs to know about a run.
#[derive(Clone, Debug, PartialEq)]
pub struct PerfOptions {
    /// The SSDs to load, in order; each may stand for several.
    pub uris: Vec<Uri>,
    /// I/Os in flight per SSD and submitting thread, spread evenly over its queue pairs.
    pub depth: u32,
    /// How large an I/O is.
    pub sizes: SizeMix,
    /// Which operations, and where.
    pub pattern: Pattern,
    /// How many of a hundred I/Os are reads, where the pattern mixes them.
    pub read_percent: u8,
    /// How long to measure.
    pub time: Span,
    /// How long to run before measuring.
    pub warm_up: Span,
    /// Where the submitting threads run, one on each; empty means one thread, where it fits best.
    pub cores: Cores,
    /// Where the threads of emulated SSDs run, one on each; empty means one thread, where it fits
    /// best.
    pub device_cores: Cores,
    /// I/O queue pairs per SSD and submitting thread.
    pub queue_pairs: u16,
    /// Stop after so many I/Os per SSD and submitting thread, even if there is time left.
    pub io_count: Option<u64>,
    /// Start I/Os at this rate, whether or not earlier ones have ended.
    pub rate: Option<OpenLoop>,
    /// Skew of the addresses: some blocks are drawn more often than others.
    pub zipf: Option<f64>,
    /// Stamp every block that is written, and check every block that is read.
    pub verify: bool,
    /// What is switched on and off on the fast path.
    pub techniques: Techniques,
    /// Measure the bare ring for so long, for the ratio.
    pub ceiling: Option<Span>,
    /// Run once more over a medium that moves data, for so long.
    pub ram: Option<Span>,
    /// Where the JSON report goes.
    pub json: Option<Output>,
    /// Where the HTML report goes.
    pub html: Option<String>,
    /// What all random numbers are made from.
    pub seed: u64,
}

/// Which operations, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Sequential reads.
    Read,
    /// Sequential writes.
    Write,
    /// Random reads.
    RandRead,
    /// Random writes.
    RandWrite,
    /// Sequential reads and writes.
    Rw,
    /// Random reads and writes.
    RandRw,
    /// Random deallocations.
    Trim,
    /// Random reads and writes, and a flush in place of every sixteenth on average.
    FlushMix,
}

/// Sizes of I/Os, with how often each is drawn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SizeMix {
    /// At least one, at most [`SIZES_MAX`]; no size and no weight is zero.
    pub shares: Vec<SizeShare>,
}

/// One size of a [`SizeMix`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeShare {
    /// Bytes in one I/O.
    pub len_bytes: u32,
    /// How often, in relation to the other weights.
    pub weight: u32,
}

/// Arrivals at a rate of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenLoop {
    /// I/Os per second, over all SSDs and threads.
    pub per_second: u64,
    /// How the time between two is drawn.
    pub arrivals: ArrivalLaw,
}

/// How the time between two arrivals is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArrivalLaw {
    /// Independent of all others, as from many clients: exponentially distributed.
    Poisson,
    /// Always the same.
    Uniform,
}

/// What can be switched on the fast path, each with its default first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Techniques {
    /// Ring the submission doorbell once per turn, and not for each command.
    pub doorbell_batching: bool,
    /// When the completion doorbell rings.
    pub completion_doorbell: CompletionDoorbell,
    /// With which instructions commands are stored; none means what suits the kind of device.
    pub command_store: Option<CommandStore>,
    /// What is fetched into the cache ahead of its use.
    pub prefetch: Prefetch,
    /// How completions are taken from the ring.
    pub completion_copy: CompletionCopy,
    /// Doorbells in memory, where the controller has them.
    pub shadow_doorbells: bool,
    /// Ask the kernel for huge pages.
    pub huge_pages: bool,
}

/// When the completion doorbell rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionDoorbell {
    /// Once per poll.
    Poll,
    /// For each completion.
    Each,
    /// Only when the controller will need the room.
    Deferred,
}

/// What is fetched into the cache ahead of its use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefetch {
    /// The slots of the next completions.
    pub slots: bool,
    /// The ring entries that will be written next.
    pub ring: bool,
    /// What `perf` itself keeps per I/O.
    pub tasks: bool,
}

/// How completions are taken from the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionCopy {
    /// A cache line of up to four at once.
    Line,
    /// One at a time.
    One,
}

/// Where a report goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// To standard output, in place of the text.
    Standard,
    /// To this file.
    File(String),
}

/// What the machine has to give.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Supplies {
    /// The cores that this process may use.
    pub cores: Cores,
    /// Memory that can be had without swapping.
    pub memory_available_bytes: u64,
}

/// Sizes in a mix at most.
pub const SIZES_MAX: usize = 8;

/// Bytes in one I/O at most.
pub const IO_BYTES_MAX: u32 = 16 << 20;

/// On average one operation of so many is a flush in [`Pattern::FlushMix`].
pub const FLUSH_EVERY: u32 = 16;

/// SSDs in one run at most: the engine's tokens have room for no more.
pub const DEVICES_MAX: u32 = 1024;

const RATE_MAX: u64 = 1_000_000_000;

impl Default for PerfOptions {
    /// What `tenmil perf` does when it is asked for nothing in particular, except for the ceiling,
    /// the phase over memory and the HTML page, which [`PerfOptions::with_extras`] adds.
    fn default() -> Self {
        Self {
            uris: vec![Uri::Emu(EmuSpec { count: 21, ..EmuSpec::new(EmuMedium::Null) })],
            depth: 128,
            sizes: SizeMix::of(4096),
            pattern: Pattern::RandRead,
            read_percent: 50,
            time: Span::from_secs(10),
            warm_up: Span::from_ms(500),
            cores: Cores::default(),
            device_cores: Cores::default(),
            queue_pairs: 1,
            io_count: None,
            rate: None,
            zipf: None,
            verify: false,
            techniques: Techniques::default(),
            ceiling: None,
            ram: None,
            json: None,
            html: None,
            seed: 1,
        }
    }
}

impl Default for Techniques {
    fn default() -> Self {
        Self {
            doorbell_batching: true,
            completion_doorbell: CompletionDoorbell::Poll,
            command_store: None,
            prefetch: Prefetch { slots: true, ring: true, tasks: true },
            completion_copy: CompletionCopy::Line,
            shadow_doorbells: false,
            huge_pages: true,
        }
    }
}

impl PerfOptions {
    /// The same, with everything that a run without any argument adds: a second of the bare ring,
    /// two seconds over memory, and `tenmil-perf.html`.
    #[must_use]
    pub fn with_extras(mut self) -> Self {
        self.ceiling = Some(CEILING_TIME);
        self.ram = Some(RAM_TIME);
        self.html = Some("tenmil-perf.html".into());
        self
    }

    /// How many SSDs the run loads.
    pub fn device_count(&self) -> u32 {
        self.uris.iter().map(Uri::count).sum()
    }

    /// How many threads submit.
    pub fn thread_count(&self) -> u32 {
        u32::try_from(self.cores.len().max(1)).unwrap_or(u32::MAX)
    }

    /// Bytes of data buffers that the run needs.
    pub fn buffer_bytes(&self) -> u64 {
        let in_flight = u64::from(self.device_count())
            .saturating_mul(u64::from(self.depth))
            .saturating_mul(u64::from(self.thread_count()));
        in_flight.saturating_mul(u64::from(self.sizes.largest()))
    }

    /// Refuses what cannot be, naming the value and what is accepted.
    pub fn check(&self, supplies: &Supplies) -> Result<(), Refused> {
        self.check_devices()?;
        self.uris.iter().try_for_each(|uri| self.check_device(uri))?;
        self.check_workload()?;
        check_cores("-c", &self.cores, supplies)?;
        check_cores("--device-cores", &self.device_cores, supplies)?;
        let (needed, there) = (self.buffer_bytes(), supplies.memory_available_bytes);
        if needed > there / 2 {
            return Err(Refused::caller(format!(
                "-q {} and -o {}: buffers for {} SSDs are {} MiB, expected at most half of the \
                 {} MiB of memory that are available",
                self.depth,
                self.sizes,
                self.device_count(),
                needed >> 20,
                there >> 20
            )));
        }
        Ok(())
    }

    fn check_devices(&self) -> Result<(), Refused> {
        let count = self.device_count();
        if !(1..=DEVICES_MAX).contains(&count) {
            let text = format!("{count} SSDs are named, expected 1 to {DEVICES_MAX}");
            return Err(Refused::caller(text));
        }
        if self.queue_pairs == 0 {
            return Err(Refused::caller("-P 0: no queue pairs, expected at least 1"));
        }
        if self.depth < u32::from(self.queue_pairs) {
            return Err(Refused::caller(format!(
                "-q {}: depth is {}, expected at least 1 for each of {} queue pairs",
                self.depth, self.depth, self.queue_pairs
            )));
        }
        Ok(())
    }

    fn check_device(&self, uri: &Uri) -> Result<(), Refused> {
        let (depth, pairs) = (self.depth, self.queue_pairs);
        let allowed = uri.depth_max().saturating_mul(u32::from(pairs));
        if depth > allowed {
            return Err(Refused::caller(format!(
                "-q {depth}: depth is {depth}, expected 1 to {allowed}, which {uri} allows"
            )));
        }
        let wanted = u32::from(pairs).saturating_mul(self.thread_count());
        if wanted > u32::from(uri.queues()) {
            return Err(Refused::caller(format!(
                "-P {pairs}: {wanted} queue pairs over {} threads, expected at most {}, which \
                 {uri} allows",
                self.thread_count(),
                uri.queues()
            )));
        }
        for SizeShare { len_bytes, .. } in &self.sizes.shares {
            if !len_bytes.is_multiple_of(uri.block_size()) {
                return Err(Refused::caller(format!(
                    "{} {}: size is {len_bytes} bytes, expected a multiple of the {}-byte blocks \
                     of {uri}",
                    self.sizes.flag(),
                    self.sizes,
                    uri.block_size()
                )));
            }
        }
        let largest = u64::from(self.sizes.largest());
        match uri.size_bytes() {
            Some(size) if size < largest => Err(Refused::caller(format!(
                "{} {}: size is {largest} bytes, expected at most the {size} bytes of {uri}",
                self.sizes.flag(),
                self.sizes
            ))),
            _ if self.verify && !uri.keeps_data() => Err(Refused::caller(format!(
                "--verify: {uri} keeps no data, expected a medium that does, such as emu:ram"
            ))),
            _ => Ok(()),
        }
    }

    fn check_workload(&self) -> Result<(), Refused> {
        if self.read_percent > 100 {
            let text = format!("-M {0}: read share is {0}, expected 0 to 100", self.read_percent);
            return Err(Refused::caller(text));
        }
        if self.time.ns == 0 {
            return Err(Refused::caller("-t 0: no time to measure in, expected more than 0"));
        }
        if self.io_count == Some(0) {
            return Err(Refused::caller("-d 0: no I/Os to do, expected at least 1"));
        }
        if let Some(OpenLoop { per_second, .. }) = self.rate
            && !(1..=RATE_MAX).contains(&per_second)
        {
            let text = format!("--rate {per_second}: expected 1 to {RATE_MAX} I/Os per second");
            return Err(Refused::caller(text));
        }
        if let Some(theta) = self.zipf
            && !(theta > 0.0 && theta <= ZIPF_MAX)
        {
            let text = format!("--zipf {theta}: expected more than 0 and at most {ZIPF_MAX}");
            return Err(Refused::caller(text));
        }
        if self.zipf.is_some() && !self.pattern.is_random() {
            let text = format!(
                "--zipf: pattern {} is sequential, expected a random one such as randread",
                self.pattern.name()
            );
            return Err(Refused::caller(text));
        }
        self.check_store()
    }

    fn check_store(&self) -> Result<(), Refused> {
        match self.techniques.command_store.map(CommandStore::checked) {
            Some(Err(missing)) => Err(Refused::caller(format!(
                "--command-store {}: {missing}, expected one of those or `auto`",
                missing.0.name()
            ))),
            _ => Ok(()),
        }
    }
}

/// How long the bare ring is measured.
pub const CEILING_TIME: Span = Span::from_secs(1);

/// How long the phase over memory is.
pub const RAM_TIME: Span = Span::from_secs(2);

/// The steepest skew.
const ZIPF_MAX: f64 = 5.0;

fn check_cores(flag: &str, cores: &Cores, supplies: &Supplies) -> Result<(), Refused> {
    match cores.iter().find(|core| !supplies.cores.contains(*core)) {
        None => Ok(()),
        Some(core) => Err(Refused::caller(format!(
            "{flag} {cores}: core {core} does not exist or is not ours, expected some of {}",
            supplies.cores
        ))),
    }
}

impl Supplies {
    /// What this machine has to give.
    pub fn look(machine: &Machine) -> Self {
        let kib = machine.memory("MemAvailable");
        let memory_available_bytes = kib.map_or(u64::MAX, |kib| kib.saturating_mul(1024));
        Self { cores: Cores::allowed(), memory_available_bytes }
    }
}

impl Pattern {
    /// Every pattern, by name.
    pub const ALL: [Self; 8] = [
        Self::Read,
        Self::Write,
        Self::RandRead,
        Self::RandWrite,
        Self::Rw,
        Self::RandRw,
        Self::Trim,
        Self::FlushMix,
    ];

    /// The name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::RandRead => "randread",
            Self::RandWrite => "randwrite",
            Self::Rw => "rw",
            Self::RandRw => "randrw",
            Self::Trim => "trim",
            Self::FlushMix => "flush-mix",
        }
    }

    /// The pattern in words.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Read => "sequential reads",
            Self::Write => "sequential writes",
            Self::RandRead => "random reads",
            Self::RandWrite => "random writes",
            Self::Rw => "sequential reads and writes",
            Self::RandRw => "random reads and writes",
            Self::Trim => "random deallocations",
            Self::FlushMix => "random reads and writes with flushes",
        }
    }

    /// Whether addresses are drawn, and not counted up.
    pub const fn is_random(self) -> bool {
        !matches!(self, Self::Read | Self::Write | Self::Rw)
    }

    /// Whether the read share has a say.
    pub const fn is_mixed(self) -> bool {
        matches!(self, Self::Rw | Self::RandRw | Self::FlushMix)
    }

    /// Whether anything is ever written.
    pub const fn writes(self) -> bool {
        !matches!(self, Self::Read | Self::RandRead)
    }
}

impl SizeMix {
    /// One size only.
    pub fn of(len_bytes: u32) -> Self {
        Self { shares: vec![SizeShare { len_bytes, weight: 1 }] }
    }

    /// Reads `4k`, or `4k:70,64k:30`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let shares: Result<Vec<SizeShare>, String> =
            text.split(',').map(|part| parse_share(text, part)).collect();
        let shares = shares?;
        if shares.len() > SIZES_MAX {
            let found = shares.len();
            return Err(format!("`{text}` has {found} sizes, expected at most {SIZES_MAX}"));
        }
        Ok(Self { shares })
    }

    /// The largest size.
    pub fn largest(&self) -> u32 {
        self.shares.iter().map(|share| share.len_bytes).max().unwrap_or(0)
    }

    /// The flag that this was given with.
    fn flag(&self) -> &'static str {
        if self.shares.len() == 1 { "-o" } else { "--bs-mix" }
    }
}

fn parse_share(mix: &str, part: &str) -> Result<SizeShare, String> {
    let (size, weight) = part.split_once(':').unwrap_or((part, "1"));
    let len_bytes = match u32::try_from(parse_size(size)?) {
        Ok(len_bytes @ 1..=IO_BYTES_MAX) => len_bytes,
        _ => {
            let most = IO_BYTES_MAX >> 20;
            return Err(format!("size is `{size}`, expected one block to {most}m"));
        }
    };
    match parse_count(weight).map(u32::try_from) {
        Ok(Ok(weight @ 1..=1_000_000)) => Ok(SizeShare { len_bytes, weight }),
        _ => {
            Err(format!("weight `{weight}` in `{mix}`, expected 1 to 1000000, as in 4k:70,64k:30"))
        }
    }
}

impl core::fmt::Display for SizeMix {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        for (index, SizeShare { len_bytes, weight }) in self.shares.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            match self.shares.len() {
                1 => write!(out, "{len_bytes}")?,
                _ => write!(out, "{comma}{len_bytes}:{weight}")?,
            }
        }
        Ok(())
    }
}

impl CompletionDoorbell {
    /// The name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Poll => "poll",
            Self::Each => "each",
            Self::Deferred => "deferred",
        }
    }
}

impl Prefetch {
    /// Reads `all`, `none`, or some of `slots,ring,tasks`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut prefetch = Self { slots: false, ring: false, tasks: false };
        match text {
            "all" => return Ok(Self { slots: true, ring: true, tasks: true }),
            "none" => return Ok(prefetch),
            _ => {}
        }
        for part in text.split(',') {
            match part {
                "slots" => prefetch.slots = true,
                "ring" => prefetch.ring = true,
                "tasks" => prefetch.tasks = true,
                _ => {
                    return Err(format!(
                        "no `{part}` to prefetch, expected some of slots,ring,tasks, or all, or \
                         none"
                    ));
                }
            }
        }
        Ok(prefetch)
    }

    /// The name on the command line and in reports.
    pub fn name(self) -> String {
        let parts = [(self.slots, "slots"), (self.ring, "ring"), (self.tasks, "tasks")];
        let on: Vec<&str> = parts.iter().filter(|(on, _)| *on).map(|(_, name)| *name).collect();
        match on.len() {
            0 => "none".into(),
            3 => "all".into(),
            _ => on.join(","),
        }
    }
}

impl CompletionCopy {
    /// The name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Line => "line",
            Self::One => "one",
        }
    }
}

#[cfg(test)]
#[path = "options_tests.rs"]
mod tests;
