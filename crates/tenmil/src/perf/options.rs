//! What a run of `perf` is asked to do: plain values, checked before anything starts.

mod check;
mod layer;
mod techniques;

use base::Span;
use host::Cores;
use reactor::{PollMode, schedule};

use crate::{EmuMedium, EmuSpec, Uri};
use block::quantity::{parse_count, parse_size};

pub use check::Supplies;
pub use layer::{Layer, LayerOptions, parse_map, show_map};
pub use techniques::{CompletionCopy, CompletionDoorbell, Prefetch, Techniques};

/// Everything the engine needs to know about a run.
#[derive(Clone, Debug, PartialEq)]
pub struct PerfOptions {
    /// The devices to load, in order; each may stand for several.
    pub uris: Vec<Uri>,
    /// I/Os in flight per device and submitting thread, spread evenly over its queue pairs.
    pub depth: u32,
    /// Nobody has asked for that depth: a device that takes fewer is loaded with as many as it takes.
    pub depth_may_be_less: bool,
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
    /// Queue pairs, or channels, per device and submitting thread.
    pub queue_pairs: u16,
    /// Stop after so many I/Os per device and submitting thread, even if there is time left.
    pub io_count: Option<u64>,
    /// Start I/Os at this rate, whether or not earlier ones have ended.
    pub rate: Option<OpenLoop>,
    /// Skew of the addresses: some blocks are drawn more often than others.
    pub zipf: Option<f64>,
    /// What stands between the load and its devices.
    pub layer: LayerOptions,
    /// Compare the modes of the block layer over a null device, for so long each.
    pub null_blk: Option<Span>,
    /// Write to devices that hold something which this run did not create.
    pub overwrite: bool,
    /// Stamp every block that is written, and check every block that is read.
    pub verify: bool,
    /// What a submitting thread does while there is nothing to do.
    pub poll: PollMode,
    /// How submitting threads are spread over the cores, and by which rules.
    pub scheduler: schedule::Options,
    /// Choose how fast the submitting threads' cores run, by their load.
    pub governor: bool,
    /// What is switched on and off on the fast path.
    pub techniques: Techniques,
    /// Measure the bare ring for so long, for the ratio.
    pub ceiling: Option<Span>,
    /// What the limit is made of.
    pub ceiling_of: CeilingOf,
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

/// Where a report goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// To standard output, in place of the text.
    Standard,
    /// To this file.
    File(String),
}

/// Sizes in a mix at most.
pub const SIZES_MAX: usize = 8;

/// Bytes in one I/O at most.
pub const IO_BYTES_MAX: u32 = 16 << 20;

/// On average one operation of so many is a flush in [`Pattern::FlushMix`].
pub const FLUSH_EVERY: u32 = 16;

/// SSDs in one run at most: the engine's tokens have room for no more.
pub const DEVICES_MAX: u32 = 1024;

impl Default for PerfOptions {
    /// What `tenmil perf` does when it is asked for nothing in particular, except for the ceiling,
    /// the phase over memory and the HTML page, which [`PerfOptions::with_extras`] adds.
    fn default() -> Self {
        Self {
            uris: vec![Uri::Emu(EmuSpec { count: 21, ..EmuSpec::new(EmuMedium::Null) })],
            depth: 128,
            depth_may_be_less: true,
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
            layer: LayerOptions::default(),
            null_blk: None,
            overwrite: false,
            verify: false,
            poll: PollMode::default(),
            scheduler: schedule::Options::default(),
            governor: false,
            techniques: Techniques::default(),
            ceiling: None,
            ceiling_of: CeilingOf::Own,
            ram: None,
            json: None,
            html: None,
            seed: 1,
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

    /// How many devices the run loads.
    pub fn device_count(&self) -> u32 {
        self.uris.iter().map(Uri::count).sum()
    }

    /// The emulated SSDs among them.
    pub fn emulated(&self) -> impl Iterator<Item = &EmuSpec> {
        self.uris.iter().filter_map(Uri::emulated)
    }

    /// Whether the device that `uri` names is loaded through the bare driver.
    pub(crate) fn is_bare(&self, uri: &Uri) -> bool {
        uri.emulated().is_some() && self.layer.over(uri) == Layer::None
    }

    /// Whether all of them are.
    pub fn is_all_emulated(&self) -> bool {
        self.uris.iter().all(|uri| uri.emulated().is_some())
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
}

/// What a run is compared with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CeilingOf {
    /// What its devices stand on: rings, copies, or sockets.
    #[default]
    Own,
    /// Bare messages of the same sizes over TCP.
    Tcp,
    /// The same over the `io_uring` engine for sockets.
    TcpRing,
}

/// How long the bare ring is measured.
pub const CEILING_TIME: Span = Span::from_secs(1);

/// How long each mode of the block layer is measured.
pub const NULL_BLK_TIME: Span = Span::from_secs(1);

/// How long the phase over memory is.
pub const RAM_TIME: Span = Span::from_secs(2);

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

#[cfg(test)]
mod tests;
