//! Validation of the options before anything starts. Each error names the value and the accepted
//! range.

use tenmil_dma::CommandStore;
use tenmil_linux::CpuList;
use tenmil_linux::kernel_files::KernelFiles;

use super::{AccessPattern, DEVICES_MAX, OpenLoop, PerfOptions, SizeShare};
use crate::balance::{check_cores_allowed, check_rule_cores_scheduled};
use crate::perf::engine::CoreAssignment;
use crate::perf::version_map::VersionMap;
use tenmil_base::Error;
use tenmil_devices::{EmuMedium, EmuSpec, Uri};
use tenmil_linux::storage_file::error_text;

/// Resources of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineResources {
    /// Cores that this process may use.
    pub cores: CpuList,
    /// Memory available without swapping (`MemAvailable`).
    pub memory_available_bytes: u64,
}

/// Maximum rate in I/Os per second.
const RATE_MAX: u64 = 1_000_000_000;

/// Maximum Zipf exponent.
const ZIPF_MAX: f64 = 5.0;

impl MachineResources {
    /// Reads the resources of this machine.
    pub fn probe_machine(machine: &KernelFiles) -> Self {
        let kib = machine.meminfo_value("MemAvailable");
        let memory_available_bytes = kib.map_or(u64::MAX, |kib| kib.saturating_mul(1024));
        Self { cores: CpuList::allowed_cpus(), memory_available_bytes }
    }
}

impl PerfOptions {
    /// Validates the options.
    pub fn validate(&self, supplies: &MachineResources) -> Result<(), Error> {
        self.check_devices()?;
        self.emulated_ssds().try_for_each(|spec| self.check_emulated_ssd(spec))?;
        self.check_verify()?;
        self.check_driver_options()?;
        self.check_block_layer_flags()?;
        self.check_workload()?;
        check_cores_allowed("-c", &self.cores, &supplies.cores)?;
        check_cores_allowed("--device-cores", &self.device_cores, &supplies.cores)?;
        check_rule_cores_scheduled(
            &self.scheduler,
            &CoreAssignment::from_options(self, &supplies.cores).submit_cores(),
        )?;
        self.check_memory(supplies)
    }

    fn check_memory(&self, supplies: &MachineResources) -> Result<(), Error> {
        let there = supplies.memory_available_bytes;
        for spec in self.emulated_ssds() {
            let size = size_of_ssd(spec)?.saturating_mul(u64::from(spec.count));
            if spec.is_in_memory() && size > there {
                return Err(Error::usage(format!(
                    "{spec}: {} MiB of memory, expected at most the {} MiB that are available",
                    size >> 20,
                    there >> 20
                )));
            }
            self.check_version_map_memory(spec, size / u64::from(spec.block_size), there)?;
        }
        let needed = self.buffer_bytes();
        if needed > there / 2 {
            return Err(Error::usage(format!(
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

    /// Rejects a version map that does not fit into `there` bytes of memory.
    pub fn check_version_map_memory(
        &self,
        name: &dyn std::fmt::Display,
        blocks: u64,
        there: u64,
    ) -> Result<(), Error> {
        let table = VersionMap::size_bytes(blocks);
        if !self.verify || table <= there / 2 {
            return Ok(());
        }
        Err(Error::usage(format!(
            "--verify: the table of {name} is {} MiB, expected at most half of the {} MiB of \
             memory that are available",
            table >> 20,
            there >> 20
        )))
    }

    fn check_devices(&self) -> Result<(), Error> {
        let count = self.device_count();
        if !(1..=DEVICES_MAX).contains(&count) {
            let text = format!("{count} SSDs are named, expected 1 to {DEVICES_MAX}");
            return Err(Error::usage(text));
        }
        if self.queue_pairs == 0 {
            return Err(Error::usage("-P 0: no queue pairs, expected at least 1"));
        }
        let least = u32::from(self.queue_pairs);
        if self.depth < least {
            let each = if least == 1 { "" } else { ", one for each queue pair" };
            let text = format!("-q {0}: depth is {0}, expected at least {least}{each}", self.depth);
            return Err(Error::usage(text));
        }
        Ok(())
    }

    fn check_emulated_ssd(&self, spec: &EmuSpec) -> Result<(), Error> {
        self.check_queues(spec, spec.depth_max(), spec.queues.into())?;
        self.check_sizes(spec, spec.block_size, size_of_ssd(spec)?)
    }

    /// Options with the depth reduced to what the devices support, if it is a default.
    pub fn with_depth_limited(&self, depth_max: u32) -> Self {
        let allowed = depth_max.saturating_mul(u32::from(self.queue_pairs)).max(1);
        let is_less = self.depth_may_be_less && self.depth > allowed;
        Self { depth: if is_less { allowed } else { self.depth }, ..self.clone() }
    }

    /// Rejects a depth or a number of queue pairs that `name` does not support.
    pub fn check_queues(
        &self,
        name: &dyn std::fmt::Display,
        depth_max: u32,
        queues_max: u32,
    ) -> Result<(), Error> {
        let (depth, pairs) = (self.depth, self.queue_pairs);
        let allowed = depth_max.saturating_mul(u32::from(pairs));
        if depth > allowed && !self.depth_may_be_less {
            return Err(Error::usage(format!(
                "-q {depth}: depth is {depth}, expected 1 to {allowed}, which {name} allows"
            )));
        }
        let wanted = u32::from(pairs).saturating_mul(self.thread_count());
        if wanted > queues_max {
            return Err(Error::usage(format!(
                "-P {pairs}: {wanted} queue pairs over all submitting threads, expected at most \
                 {queues_max}, which {name} allows"
            )));
        }
        Ok(())
    }

    /// Rejects sizes that are not a multiple of the block size of `name`, or exceed its size.
    pub fn check_sizes(
        &self,
        name: &dyn std::fmt::Display,
        block_size: u32,
        size_bytes: u64,
    ) -> Result<(), Error> {
        let (flag, sizes) = (self.sizes.flag_name(), &self.sizes);
        for SizeShare { len_bytes, .. } in &sizes.shares {
            if !len_bytes.is_multiple_of(block_size) {
                return Err(Error::usage(format!(
                    "{flag} {sizes}: size is {len_bytes} bytes, expected a multiple of the \
                     {block_size}-byte blocks of {name}"
                )));
            }
        }
        let largest = u64::from(sizes.largest_bytes());
        if size_bytes < largest {
            return Err(Error::usage(format!(
                "{flag} {sizes}: size is {largest} bytes, expected at most the {size_bytes} bytes \
                 of {name}"
            )));
        }
        Ok(())
    }

    fn check_verify(&self) -> Result<(), Error> {
        match self.uris.iter().find(|uri| self.verify && !uri.keeps_data()) {
            None => Ok(()),
            Some(uri) => Err(Error::usage(format!(
                "--verify: {uri} keeps no data, expected a medium that does, such as emu:ram"
            ))),
        }
    }

    /// Rejects driver options if no device of the run uses the driver.
    fn check_driver_options(&self) -> Result<(), Error> {
        let Some(uri) = self.uris.iter().find(|uri| uri.emulated().is_none()) else {
            return Ok(());
        };
        let refuse = |flag: &str, what: &str| {
            let text =
                format!("{flag}: {uri} has no {what}, expected emulated SSDs such as emu:ram");
            Err(Error::usage(text))
        };
        if self.ram.is_some() {
            return refuse("--ram", "other medium to be put in its place");
        }
        self.check_baseline()?;
        if self.emulated_ssds().next().is_some() {
            return Ok(());
        }
        if !self.device_cores.is_empty() {
            return refuse("--device-cores", "threads of an emulated SSD");
        }
        match self.techniques.first_changed_driver_flag() {
            Some(flag) => refuse(flag, "rings and doorbells"),
            None => Ok(()),
        }
    }

    /// Rejects flags that need a block layer where there is none.
    fn check_block_layer_flags(&self) -> Result<(), Error> {
        for uri in &self.uris {
            let layer = self.layer.layer_of_device(uri);
            if let Some(flag) = self.layer.first_unsupported_flag(layer) {
                return Err(Error::usage(format!(
                    "{flag}: {uri} is reached by --block {layer}, expected --block mq{}",
                    if flag == "--queue-map" { "" } else { " or single" }
                )));
            }
        }
        Ok(())
    }

    /// Rejects a baseline for devices that have none. The baseline of RAM devices is memory copies.
    fn check_baseline(&self) -> Result<(), Error> {
        if self.baseline_time.is_some() && self.message_baseline_engine().is_some() {
            return self.check_message_baseline();
        }
        let is_ram = |uri: &Uri| matches!(uri, Uri::Block(uri) if uri.scheme() == "ram");
        let copies = matches!(
            self.pattern,
            AccessPattern::Read
                | AccessPattern::Write
                | AccessPattern::RandRead
                | AccessPattern::RandWrite
        ) || self.pattern.has_read_percentage()
            && self.pattern != AccessPattern::FlushMix;
        match self.uris.iter().find(|uri| !is_ram(uri)) {
            _ if self.baseline_time.is_none() => Ok(()),
            Some(uri) => Err(Error::usage(format!(
                "--baseline: {uri} has neither a ring nor a copy micro-benchmark, expected emulated \
                 SSDs alone, ram: alone, or --baseline=tcp"
            ))),
            None if !copies => Err(Error::usage(format!(
                "--baseline: pattern {} copies no data, expected one that reads or writes",
                self.pattern.name()
            ))),
            None if self.thread_count() > 1 => Err(Error::usage(format!(
                "--baseline: {} submitting threads, expected one, which copies",
                self.thread_count()
            ))),
            None => Ok(()),
        }
    }

    /// Rejects a message baseline for workloads with several sizes or both directions.
    fn check_message_baseline(&self) -> Result<(), Error> {
        let is_plain = matches!(
            self.pattern,
            AccessPattern::Read
                | AccessPattern::Write
                | AccessPattern::RandRead
                | AccessPattern::RandWrite
        );
        if !is_plain {
            return Err(Error::usage(format!(
                "--baseline: pattern {} mixes reads and writes, expected one that reads or writes: \
                 the bare ring has one direction",
                self.pattern.name()
            )));
        }
        if self.sizes.shares.len() > 1 {
            let text = "--baseline: several sizes, expected one: bare messages are of one size";
            return Err(Error::usage(text));
        }
        Ok(())
    }

    fn check_workload(&self) -> Result<(), Error> {
        if self.read_percent > 100 {
            let text = format!("-M {0}: read share is {0}, expected 0 to 100", self.read_percent);
            return Err(Error::usage(text));
        }
        if self.time.ns == 0 {
            return Err(Error::usage("-t 0: no time to measure in, expected more than 0"));
        }
        if self.io_count == Some(0) {
            return Err(Error::usage("-d 0: no I/Os to do, expected at least 1"));
        }
        if let Some(OpenLoop { per_second, .. }) = self.rate
            && !(1..=RATE_MAX).contains(&per_second)
        {
            let text = format!("--rate {per_second}: expected 1 to {RATE_MAX} I/Os per second");
            return Err(Error::usage(text));
        }
        if let Some(theta) = self.zipf
            && !(theta > 0.0 && theta <= ZIPF_MAX)
        {
            let text = format!("--zipf {theta}: expected more than 0 and at most {ZIPF_MAX}");
            return Err(Error::usage(text));
        }
        if self.zipf.is_some() && !self.pattern.is_random() {
            let text = format!(
                "--zipf: pattern {} is sequential, expected a random one such as randread",
                self.pattern.name()
            );
            return Err(Error::usage(text));
        }
        self.check_command_store()
    }

    fn check_command_store(&self) -> Result<(), Error> {
        match self.techniques.command_store.map(CommandStore::check_supported) {
            Some(Err(missing)) => Err(Error::usage(format!(
                "--command-store {}: {missing}, expected one of those or `auto`",
                missing.0.name()
            ))),
            _ => Ok(()),
        }
    }
}

/// Size of each SSD of `spec`. A file without a given size must exist.
fn size_of_ssd(spec: &EmuSpec) -> Result<u64, Error> {
    if let Some(size) = spec.size_bytes_known() {
        return Ok(size);
    }
    let EmuMedium::File { path } = &spec.medium else { return Ok(u64::MAX) };
    match std::fs::metadata(path) {
        Ok(found) if found.is_file() => Ok(found.len()),
        Ok(_) => Err(Error::usage(format!("{spec}: no ordinary file, expected one"))),
        Err(error) => Err(Error::usage(format!(
            "{spec}: {}, expected a file that is there, or `?size=` to make one",
            error_text(&error)
        ))),
    }
}
