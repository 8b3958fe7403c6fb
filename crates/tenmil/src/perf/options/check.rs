//! What cannot be, refused before anything starts: each in a line that names the value and what is
//! accepted.

use dma::CommandStore;
use host::Cores;
use host::machine::Machine;

use super::{DEVICES_MAX, OpenLoop, Pattern, PerfOptions, SizeShare};
use crate::balance::{check_cores, check_rules};
use crate::perf::engine::Places;
use crate::perf::ledger::Ledger;
use crate::refused::reason;
use crate::{EmuMedium, EmuSpec, Refused, Uri};

/// What the machine has to give.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Supplies {
    /// The cores that this process may use.
    pub cores: Cores,
    /// Memory that can be had without swapping.
    pub memory_available_bytes: u64,
}

/// The highest rate.
const RATE_MAX: u64 = 1_000_000_000;

/// The steepest skew.
const ZIPF_MAX: f64 = 5.0;

impl Supplies {
    /// What this machine has to give.
    pub fn look(machine: &Machine) -> Self {
        let kib = machine.memory("MemAvailable");
        let memory_available_bytes = kib.map_or(u64::MAX, |kib| kib.saturating_mul(1024));
        Self { cores: Cores::allowed(), memory_available_bytes }
    }
}

impl PerfOptions {
    /// Refuses what cannot be, naming the value and what is accepted.
    pub fn check(&self, supplies: &Supplies) -> Result<(), Refused> {
        self.check_devices()?;
        self.emulated().try_for_each(|spec| self.check_ssd(spec))?;
        self.check_verify()?;
        self.check_switches()?;
        self.check_layer()?;
        self.check_workload()?;
        check_cores("-c", &self.cores, &supplies.cores)?;
        check_cores("--device-cores", &self.device_cores, &supplies.cores)?;
        check_rules(&self.scheduler, &Places::choose(self, &supplies.cores).submit_cores())?;
        self.check_memory(supplies)
    }

    fn check_memory(&self, supplies: &Supplies) -> Result<(), Refused> {
        let there = supplies.memory_available_bytes;
        for spec in self.emulated() {
            let size = size_of_ssd(spec)?.saturating_mul(u64::from(spec.count));
            if spec.is_in_memory() && size > there {
                return Err(Refused::caller(format!(
                    "{spec}: {} MiB of memory, expected at most the {} MiB that are available",
                    size >> 20,
                    there >> 20
                )));
            }
            self.check_table(spec, size / u64::from(spec.block_size), there)?;
        }
        let needed = self.buffer_bytes();
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

    /// Refuses a table of versions that `there` bytes of memory have no room for.
    pub(crate) fn check_table(
        &self,
        name: &dyn std::fmt::Display,
        blocks: u64,
        there: u64,
    ) -> Result<(), Refused> {
        let table = Ledger::size_bytes(blocks);
        if !self.verify || table <= there / 2 {
            return Ok(());
        }
        Err(Refused::caller(format!(
            "--verify: the table of {name} is {} MiB, expected at most half of the {} MiB of \
             memory that are available",
            table >> 20,
            there >> 20
        )))
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
        let least = u32::from(self.queue_pairs);
        if self.depth < least {
            let each = if least == 1 { "" } else { ", one for each queue pair" };
            let text = format!("-q {0}: depth is {0}, expected at least {least}{each}", self.depth);
            return Err(Refused::caller(text));
        }
        Ok(())
    }

    fn check_ssd(&self, spec: &EmuSpec) -> Result<(), Refused> {
        self.check_queues(spec, spec.depth_max(), spec.queues.into())?;
        self.check_sizes(spec, spec.block_size, size_of_ssd(spec)?)
    }

    /// The same for devices that take so many I/Os in flight on a queue pair.
    pub(crate) fn suited_to(&self, depth_max: u32) -> Self {
        let allowed = depth_max.saturating_mul(u32::from(self.queue_pairs)).max(1);
        let is_less = self.depth_may_be_less && self.depth > allowed;
        Self { depth: if is_less { allowed } else { self.depth }, ..self.clone() }
    }

    /// Refuses more I/Os in flight, or more queue pairs, than `name` allows.
    pub(crate) fn check_queues(
        &self,
        name: &dyn std::fmt::Display,
        depth_max: u32,
        queues_max: u32,
    ) -> Result<(), Refused> {
        let (depth, pairs) = (self.depth, self.queue_pairs);
        let allowed = depth_max.saturating_mul(u32::from(pairs));
        if depth > allowed && !self.depth_may_be_less {
            return Err(Refused::caller(format!(
                "-q {depth}: depth is {depth}, expected 1 to {allowed}, which {name} allows"
            )));
        }
        let wanted = u32::from(pairs).saturating_mul(self.thread_count());
        if wanted > queues_max {
            return Err(Refused::caller(format!(
                "-P {pairs}: {wanted} queue pairs over all submitting threads, expected at most \
                 {queues_max}, which {name} allows"
            )));
        }
        Ok(())
    }

    /// Refuses sizes that are no whole number of blocks of `name`, or more than it has.
    pub(crate) fn check_sizes(
        &self,
        name: &dyn std::fmt::Display,
        block_size: u32,
        size_bytes: u64,
    ) -> Result<(), Refused> {
        let (flag, sizes) = (self.sizes.flag(), &self.sizes);
        for SizeShare { len_bytes, .. } in &sizes.shares {
            if !len_bytes.is_multiple_of(block_size) {
                return Err(Refused::caller(format!(
                    "{flag} {sizes}: size is {len_bytes} bytes, expected a multiple of the \
                     {block_size}-byte blocks of {name}"
                )));
            }
        }
        let largest = u64::from(sizes.largest());
        if size_bytes < largest {
            return Err(Refused::caller(format!(
                "{flag} {sizes}: size is {largest} bytes, expected at most the {size_bytes} bytes \
                 of {name}"
            )));
        }
        Ok(())
    }

    fn check_verify(&self) -> Result<(), Refused> {
        match self.uris.iter().find(|uri| self.verify && !uri.keeps_data()) {
            None => Ok(()),
            Some(uri) => Err(Refused::caller(format!(
                "--verify: {uri} keeps no data, expected a medium that does, such as emu:ram"
            ))),
        }
    }

    /// Refuses what is switched on a fast path that no device of the run has.
    fn check_switches(&self) -> Result<(), Refused> {
        self.techniques.check()?;
        let Some(uri) = self.uris.iter().find(|uri| uri.emulated().is_none()) else {
            return Ok(());
        };
        let refuse = |flag: &str, what: &str| {
            let text =
                format!("{flag}: {uri} has no {what}, expected emulated SSDs such as emu:ram");
            Err(Refused::caller(text))
        };
        if self.ram.is_some() {
            return refuse("--ram", "other medium to be put in its place");
        }
        self.check_ceiling()?;
        if self.emulated().next().is_some() {
            return Ok(());
        }
        if !self.device_cores.is_empty() {
            return refuse("--device-cores", "threads of an emulated SSD");
        }
        match self.techniques.switched_in_driver() {
            Some(flag) => refuse(flag, "rings and doorbells"),
            None => Ok(()),
        }
    }

    /// Refuses what needs a layer where there is none.
    fn check_layer(&self) -> Result<(), Refused> {
        for uri in &self.uris {
            let layer = self.layer.over(uri);
            if let Some(flag) = self.layer.needs_more_than(layer) {
                return Err(Refused::caller(format!(
                    "{flag}: {uri} is reached by --block {layer}, expected --block mq{}",
                    if flag == "--queue-map" { "" } else { " or single" }
                )));
            }
        }
        Ok(())
    }

    /// Refuses a limit for what has none that is known: memory has the copies of its data.
    fn check_ceiling(&self) -> Result<(), Refused> {
        if self.ceiling.is_some() && self.exchange_engine().is_some() {
            return self.check_exchange();
        }
        let is_ram = |uri: &Uri| matches!(uri, Uri::Block(uri) if uri.scheme() == "ram");
        let copies = matches!(
            self.pattern,
            Pattern::Read | Pattern::Write | Pattern::RandRead | Pattern::RandWrite
        ) || self.pattern.is_mixed() && self.pattern != Pattern::FlushMix;
        match self.uris.iter().find(|uri| !is_ram(uri)) {
            _ if self.ceiling.is_none() => Ok(()),
            Some(uri) => Err(Refused::caller(format!(
                "--ceiling: {uri} has neither a bare ring nor bare copies, expected emulated SSDs \
                 alone, ram: alone, or --ceiling=tcp"
            ))),
            None if !copies => Err(Refused::caller(format!(
                "--ceiling: pattern {} is no copying, expected one that reads or writes",
                self.pattern.name()
            ))),
            None if self.thread_count() > 1 => Err(Refused::caller(format!(
                "--ceiling: {} submitting threads, expected one: bare copies are made by one",
                self.thread_count()
            ))),
            None => Ok(()),
        }
    }

    /// Refuses to compare bare messages with what has no one size or direction.
    fn check_exchange(&self) -> Result<(), Refused> {
        let is_plain = matches!(
            self.pattern,
            Pattern::Read | Pattern::Write | Pattern::RandRead | Pattern::RandWrite
        );
        if !is_plain {
            return Err(Refused::caller(format!(
                "--ceiling: pattern {} goes both ways, expected one that reads or writes: bare \
                 messages go one way",
                self.pattern.name()
            )));
        }
        if self.sizes.shares.len() > 1 {
            let text = "--ceiling: several sizes, expected one: bare messages are of one size";
            return Err(Refused::caller(text));
        }
        Ok(())
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

/// Bytes on each SSD of `spec`; a file that has to exist does.
fn size_of_ssd(spec: &EmuSpec) -> Result<u64, Refused> {
    if let Some(size) = spec.size_bytes_known() {
        return Ok(size);
    }
    let EmuMedium::File { path } = &spec.medium else { return Ok(u64::MAX) };
    match std::fs::metadata(path) {
        Ok(found) if found.is_file() => Ok(found.len()),
        Ok(_) => Err(Refused::caller(format!("{spec}: no ordinary file, expected one"))),
        Err(error) => Err(Refused::caller(format!(
            "{spec}: {}, expected a file that is there, or `?size=` to make one",
            reason(&error)
        ))),
    }
}
