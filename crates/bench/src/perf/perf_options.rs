//! Options of a `perf` run: plain values, checked before anything starts.

mod block_layer_options;
mod options_validation;

use tenmil_base::Span;
use tenmil_linux::CpuList;
use tenmil_reactor::{PollMode, thread_scheduler};

use tenmil_block::quantity_parser::{parse_count, parse_size};
use tenmil_devices::{EmuMedium, EmuSpec, Uri};

pub use block_layer_options::{BlockLayerMode, BlockLayerOptions, parse_queue_map, queue_map_text};
pub use options_validation::MachineResources;
pub use tenmil_devices::{CompletionDoorbell, FastPathSwitches};

/// Configuration of a `perf` run.
#[derive(Clone, Debug, PartialEq)]
pub struct PerfOptions {
    /// Devices to load, in order. Each URI may describe several.
    pub uris: Vec<Uri>,
    /// Queue depth: I/Os in flight per device and submitting thread, divided evenly among its queue
    /// pairs.
    pub depth: u32,
    /// The depth is a default: it is reduced for a device with a smaller one.
    pub depth_may_be_less: bool,
    /// I/O sizes.
    pub sizes: SizeMix,
    /// Access pattern.
    pub pattern: AccessPattern,
    /// Percentage of reads in a mixed pattern.
    pub read_percent: u8,
    /// Duration of the measurement.
    pub time: Span,
    /// Duration of the warm-up before it.
    pub warm_up: Span,
    /// Cores of the submitting threads, one each. Empty means one thread on the best core.
    pub cores: CpuList,
    /// Cores of the threads of emulated SSDs, one each. Empty means one thread on the best core.
    pub device_cores: CpuList,
    /// Queue pairs, or channels, per device and submitting thread.
    pub queue_pairs: u16,
    /// Number of I/Os per device and submitting thread after which the run stops.
    pub io_count: Option<u64>,
    /// Rate of an open-loop load, whose I/Os start independently of completions.
    pub rate: Option<OpenLoop>,
    /// Zipf exponent of the address distribution.
    pub zipf: Option<f64>,
    /// Block layer above the devices.
    pub layer: BlockLayerOptions,
    /// Duration for each mode of the block-layer comparison over a null device.
    pub null_blk: Option<Span>,
    /// Allows writes to devices with existing data.
    pub overwrite: bool,
    /// Stamps every block that is written and verifies every block that is read.
    pub verify: bool,
    /// Behavior of an idle submitting thread.
    pub poll: PollMode,
    /// Policy and rules by which submitting threads are distributed over the cores.
    pub scheduler: thread_scheduler::Options,
    /// Whether to scale the frequency of the submitting threads' cores with their load.
    pub governor: bool,
    /// Driver options.
    pub techniques: FastPathSwitches,
    /// Duration of the baseline measurement.
    pub baseline_time: Option<Span>,
    /// Kind of the baseline.
    pub baseline_kind: BaselineKind,
    /// Duration of an additional run over RAM devices, which transfer data.
    pub ram: Option<Span>,
    /// Destination of the JSON report.
    pub json: Option<ReportDestination>,
    /// Path of the HTML report.
    pub html: Option<String>,
    /// Seed of all random numbers.
    pub seed: u64,
}

/// Access pattern: operations and order of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessPattern {
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
    /// Random reads and writes; on average every sixteenth operation is a flush.
    FlushMix,
}

/// I/O sizes with weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SizeMix {
    /// At least one and at most [`SIZES_MAX`]. No size and no weight is zero.
    pub shares: Vec<SizeShare>,
}

/// One size of a [`SizeMix`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeShare {
    /// Bytes per I/O.
    pub len_bytes: u32,
    /// Weight relative to the other sizes.
    pub weight: u32,
}

/// Open-loop load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenLoop {
    /// I/Os per second, over all devices and threads.
    pub per_second: u64,
    /// Distribution of the time between two arrivals.
    pub arrivals: ArrivalProcess,
}

/// Distribution of the time between two arrivals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArrivalProcess {
    /// Exponential: independent arrivals, as from many clients.
    Poisson,
    /// Constant.
    Uniform,
}

/// Destination of a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReportDestination {
    /// Standard output, in place of the text report.
    Standard,
    /// This file.
    File(String),
}

/// Maximum number of sizes in a mix.
pub const SIZES_MAX: usize = 8;

/// Maximum number of bytes per I/O.
pub const IO_BYTES_MAX: u32 = 16 << 20;

/// Average number of operations per flush in [`AccessPattern::FlushMix`].
pub const FLUSH_EVERY: u32 = 16;

/// Maximum number of devices in a run, limited by the tokens of the engine.
pub const DEVICES_MAX: u32 = 1024;

impl Default for PerfOptions {
    /// Options of `tenmil perf` without arguments, except for the baseline, the run over RAM and
    /// the HTML report, which [`PerfOptions::with_default_baseline_and_report`] adds.
    fn default() -> Self {
        Self {
            uris: vec![Uri::Emu(EmuSpec { count: 21, ..EmuSpec::new(EmuMedium::Null) })],
            depth: 128,
            depth_may_be_less: true,
            sizes: SizeMix::single_size(4096),
            pattern: AccessPattern::RandRead,
            read_percent: 50,
            time: Span::from_secs(10),
            warm_up: Span::from_ms(500),
            cores: CpuList::default(),
            device_cores: CpuList::default(),
            queue_pairs: 1,
            io_count: None,
            rate: None,
            zipf: None,
            layer: BlockLayerOptions::default(),
            null_blk: None,
            overwrite: false,
            verify: false,
            poll: PollMode::default(),
            scheduler: thread_scheduler::Options::default(),
            governor: false,
            techniques: FastPathSwitches::default(),
            baseline_time: None,
            baseline_kind: BaselineKind::Own,
            ram: None,
            json: None,
            html: None,
            seed: 1,
        }
    }
}

impl PerfOptions {
    /// Adds what a run without arguments includes: one second of baseline, two seconds over RAM,
    /// and the report `tenmil-perf.html`.
    #[must_use]
    pub fn with_default_baseline_and_report(mut self) -> Self {
        self.baseline_time = Some(BASELINE_TIME);
        self.ram = Some(RAM_TIME);
        self.html = Some("tenmil-perf.html".into());
        self
    }

    /// Number of devices.
    pub fn device_count(&self) -> u32 {
        self.uris.iter().map(Uri::count).sum()
    }

    /// Emulated SSDs among the devices.
    pub fn emulated_ssds(&self) -> impl Iterator<Item = &EmuSpec> {
        self.uris.iter().filter_map(Uri::emulated)
    }

    /// Whether the device that `uri` names is loaded through the driver without the block layer.
    pub fn bypasses_block_layer(&self, uri: &Uri) -> bool {
        uri.emulated().is_some() && self.layer.layer_of_device(uri) == BlockLayerMode::None
    }

    /// Whether all devices are emulated SSDs.
    pub fn is_all_emulated(&self) -> bool {
        self.uris.iter().all(|uri| uri.emulated().is_some())
    }

    /// Number of submitting threads.
    pub fn thread_count(&self) -> u32 {
        u32::try_from(self.cores.len().max(1)).unwrap_or(u32::MAX)
    }

    /// Bytes of data buffers.
    pub fn buffer_bytes(&self) -> u64 {
        let in_flight = u64::from(self.device_count())
            .saturating_mul(u64::from(self.depth))
            .saturating_mul(u64::from(self.thread_count()));
        in_flight.saturating_mul(u64::from(self.sizes.largest_bytes()))
    }
}

/// Kind of baseline that a run is compared with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BaselineKind {
    /// The lowest layer of its devices: rings, memory copies, or sockets.
    #[default]
    Own,
    /// Plain messages of the same sizes over TCP.
    Tcp,
    /// The same over the `io_uring` socket engine.
    TcpRing,
}

/// Default duration of the baseline.
pub const BASELINE_TIME: Span = Span::from_secs(1);

/// Default duration for each mode of the block layer.
pub const NULL_BLK_TIME: Span = Span::from_secs(1);

/// Default duration of the run over RAM.
pub const RAM_TIME: Span = Span::from_secs(2);

impl AccessPattern {
    /// All patterns.
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

    /// Name on the command line and in reports.
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

    /// Description of the pattern.
    pub const fn text(self) -> &'static str {
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

    /// Whether addresses are random.
    pub const fn is_random(self) -> bool {
        !matches!(self, Self::Read | Self::Write | Self::Rw)
    }

    /// Whether the percentage of reads applies.
    pub const fn has_read_percentage(self) -> bool {
        matches!(self, Self::Rw | Self::RandRw | Self::FlushMix)
    }

    /// Whether the pattern changes data.
    pub const fn has_writes(self) -> bool {
        !matches!(self, Self::Read | Self::RandRead)
    }
}

impl SizeMix {
    /// Mix of a single size.
    pub fn single_size(len_bytes: u32) -> Self {
        Self { shares: vec![SizeShare { len_bytes, weight: 1 }] }
    }

    /// Parses `4k` or `4k:70,64k:30`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let shares: Result<Vec<SizeShare>, String> =
            text.split(',').map(|part| parse_size_share(text, part)).collect();
        let shares = shares?;
        if shares.len() > SIZES_MAX {
            let found = shares.len();
            return Err(format!("`{text}` has {found} sizes, expected at most {SIZES_MAX}"));
        }
        Ok(Self { shares })
    }

    /// Largest size.
    pub fn largest_bytes(&self) -> u32 {
        self.shares.iter().map(|share| share.len_bytes).max().unwrap_or(0)
    }

    /// Command line flag for this kind of mix.
    fn flag_name(&self) -> &'static str {
        if self.shares.len() == 1 { "-o" } else { "--bssplit" }
    }
}

fn parse_size_share(mix: &str, part: &str) -> Result<SizeShare, String> {
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
