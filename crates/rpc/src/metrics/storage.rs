//! Metrics of pools, volumes, mirrors and paths.
//!
//! Pools and mirrors are read on a worker thread, since their state is behind locks that I/O needs, and a
//! pool may wait for its device. A reader starts a sample, waits for it for a short time, and uses the
//! previous one if a device is slow; the age of the values is a metric, too.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tenmil_base::{Instant, Span};
use tenmil_block::DeviceControl;
use tenmil_drivers::mirror::{Health, LegState, MirrorMonitor, MirrorProgress};
use tenmil_drivers::pool::{Info, OpenPool, PAGE_BYTES, list_open_pools};
use tenmil_linux::Clock;
use tenmil_nvme_fabrics::PathTable;

use super::families::{
    MIRROR_DIRTY, MIRROR_HEALTH, MIRROR_LEFT, MIRROR_LEGS, MIRROR_LEGS_LOST, MIRROR_LEGS_RESYNCED,
    MIRROR_WRITES_LOST, PATH_ACCESS, PATH_CONNECTS, PATH_FAILED_CONNECTS, PATH_FAILOVERS,
    PATH_LOSSES, PATH_PREFERRED, PATH_RETRIES, PATH_STATE, PATH_TIMEOUTS, PATH_UNSERVED, PATH_UP,
    POOL_FREE, POOL_PROVISIONED, POOL_RESERVED, POOL_SIZE, POOL_STOPPED, POOL_USED, POOL_VOLUMES,
    POOL_WRITE_LOSSES, STORAGE_AGE, VOLUME_SIZE, VOLUME_USED,
};
use super::metrics_text::MetricsText;
use crate::methods::DeviceControls;
use crate::pool_commands::PoolCommands;
use crate::process_parts::ProcessParts;

/// Longest wait for a sample.
pub(super) const WAIT_MAX: Span = Span::from_ms(20);

/// Largest number of volumes with series of their own; the others are only in the sums of their pool.
const VOLUMES_MAX: usize = 1_000;

const HEALTHS: [Health; 3] = [Health::Healthy, Health::Resynchronizing, Health::Degraded];
const LEG_STATES: [LegState; 4] =
    [LegState::InSync, LegState::Resyncing, LegState::Stale, LegState::Missing];
const PATH_STATES: [&str; 4] = ["trying", "up", "lost", "unfit"];

/// Last sample of pools and mirrors.
#[derive(Debug, Default)]
pub(crate) struct StorageSampler {
    state: Mutex<SamplerState>,
    is_complete: Condvar,
}

#[derive(Debug, Default)]
struct SamplerState {
    /// Whether a worker has a sample to take or takes one.
    is_running: bool,
    last: Option<Arc<StorageSample>>,
}

#[derive(Debug)]
struct StorageSample {
    at: Instant,
    pools: Vec<PoolSample>,
    mirrors: Vec<(String, MirrorProgress)>,
}

#[derive(Debug)]
struct PoolSample {
    label: String,
    size_bytes: u64,
    used_bytes: u64,
    free_bytes: u64,
    reserved_bytes: u64,
    write_losses: u64,
    is_stopped: bool,
    volumes: Vec<Info>,
}

pub(super) fn collect(parts: &ProcessParts, text: &mut MetricsText) {
    collect_paths(parts, text);
    let Ok(commands) = parts.find_part::<PoolCommands>("pools of volumes") else { return };
    let controls = parts.find_part::<DeviceControls>("devices that can be watched");
    let controls = controls.map(DeviceControls::all_controls).unwrap_or_default();
    let has_mirrors = controls.iter().any(|one| one.downcast::<MirrorMonitor>().is_some());
    if !has_mirrors && list_open_pools().is_empty() {
        return;
    }
    let clock = Clock::on_kernel_clock();
    let Some(sample) = commands.sampler().take_sample(commands, controls) else { return };
    text.add(&STORAGE_AGE, [], clock.now().since(sample.at).ns);
    for pool in &sample.pools {
        pool.write(text);
    }
    for (device, progress) in &sample.mirrors {
        write_mirror(device, progress, text);
    }
}

impl StorageSampler {
    /// Starts a sample unless one is being taken, and waits for it. Returns the last one that is complete.
    fn take_sample(
        self: &Arc<Self>,
        commands: &PoolCommands,
        controls: Vec<DeviceControl>,
    ) -> Option<Arc<StorageSample>> {
        let mut state = self.lock();
        if !state.is_running {
            state.is_running = true;
            drop(state);
            let sampler = Arc::clone(self);
            let queued = commands.queue_task(Box::new(move || sampler.sample_storage(&controls)));
            state = self.lock();
            state.is_running &= queued.is_ok();
        }
        let wait = Duration::from_nanos(WAIT_MAX.ns);
        let waited = self.is_complete.wait_timeout_while(state, wait, |state| state.is_running);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.last.clone()
    }

    fn sample_storage(&self, controls: &[DeviceControl]) {
        let sample = Arc::new(StorageSample::take(controls));
        let mut state = self.lock();
        (state.is_running, state.last) = (false, Some(sample));
        drop(state);
        self.is_complete.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, SamplerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StorageSample {
    fn take(controls: &[DeviceControl]) -> Self {
        let at = Clock::on_kernel_clock().now();
        let open = list_open_pools();
        let mut names = BTreeMap::<String, usize>::new();
        for pool in &open {
            *names.entry(pool.name()).or_default() += 1;
        }
        let pools = open.iter().filter_map(|pool| {
            let name = pool.name();
            // A name that several pools have identifies none of them.
            let is_unique = !name.is_empty() && names.get(&name) == Some(&1);
            PoolSample::take(pool, if is_unique { name } else { pool.device_uri().to_owned() })
        });
        let mirrors = controls.iter().filter_map(|control| {
            let monitor = control.downcast::<MirrorMonitor>()?;
            Some((control.uri().to_owned(), monitor.progress()?))
        });
        Self { at, pools: pools.collect(), mirrors: mirrors.collect() }
    }
}

impl PoolSample {
    /// Reads a pool; `None` if its metadata cannot be read.
    fn take(pool: &OpenPool, label: String) -> Option<Self> {
        let usage = pool.pool_usage().ok()??;
        Some(Self {
            label,
            size_bytes: bytes_of_blocks(usage.blocks),
            used_bytes: bytes_of_blocks(usage.used),
            free_bytes: bytes_of_blocks(usage.free),
            reserved_bytes: bytes_of_blocks(usage.kept + usage.provisioned),
            write_losses: pool.write_loss_count(),
            is_stopped: pool.stop_reason().is_some(),
            volumes: pool.list_volumes().ok()?,
        })
    }

    fn write(&self, text: &mut MetricsText) {
        let label = self.label.as_str();
        let writable = || self.volumes.iter().filter(|info| !info.is_read_only);
        let provisioned = writable().map(|info| info.blocks).sum();
        let numbers = [
            (&POOL_SIZE, self.size_bytes),
            (&POOL_USED, self.used_bytes),
            (&POOL_FREE, self.free_bytes),
            (&POOL_RESERVED, self.reserved_bytes),
            (&POOL_PROVISIONED, bytes_of_blocks(provisioned)),
            (&POOL_VOLUMES, self.volumes.len() as u64),
            (&POOL_STOPPED, u64::from(self.is_stopped)),
            (&POOL_WRITE_LOSSES, self.write_losses),
        ];
        for (family, value) in numbers {
            text.add(family, [label], value);
        }
        for info in writable().take(VOLUMES_MAX) {
            text.add(&VOLUME_SIZE, [label, &info.name], bytes_of_blocks(info.blocks));
            text.add(&VOLUME_USED, [label, &info.name], bytes_of_blocks(info.mapped));
        }
    }
}

fn write_mirror(device: &str, progress: &MirrorProgress, text: &mut MetricsText) {
    for state in LEG_STATES {
        let count = progress.legs.iter().filter(|leg| leg.state == state).count();
        text.add(&MIRROR_LEGS, [device, state.name()], count as u64);
    }
    for health in HEALTHS {
        let is_it = u64::from(health == progress.health);
        text.add(&MIRROR_HEALTH, [device, health.name()], is_it);
    }
    let bytes = |regions: u64| regions.saturating_mul(progress.region_bytes);
    let numbers = [
        (&MIRROR_DIRTY, bytes(progress.dirty_regions)),
        (&MIRROR_LEFT, bytes(progress.left_regions)),
        (&MIRROR_LEGS_LOST, progress.counters.legs_lost),
        (&MIRROR_LEGS_RESYNCED, progress.counters.legs_resynchronized),
        (&MIRROR_WRITES_LOST, progress.counters.writes_lost),
    ];
    for (family, value) in numbers {
        text.add(family, [device], value);
    }
}

fn collect_paths(parts: &ProcessParts, text: &mut MetricsText) {
    let Ok(paths) = parts.find_part::<PathTable>("paths") else { return };
    for row in paths.rows() {
        let path = row.number.to_string();
        let labels = [row.device.as_str(), &path, &row.address];
        let [device, path, address] = labels;
        for state in PATH_STATES {
            let is_it = u64::from(row.state == state);
            text.add(&PATH_STATE, [device, path, address, state], is_it);
        }
        if let Some(access) = row.access {
            text.add(&PATH_ACCESS, [device, path, address, access], 1);
        }
        let numbers = [
            (&PATH_UP, u64::from(row.state == "up")),
            (&PATH_PREFERRED, u64::from(row.is_preferred)),
            (&PATH_CONNECTS, row.ups),
            (&PATH_LOSSES, row.losses),
            (&PATH_FAILED_CONNECTS, row.failed_connects),
            (&PATH_FAILOVERS, row.failovers),
            (&PATH_TIMEOUTS, row.timeouts),
            (&PATH_RETRIES, row.retries),
        ];
        for (family, value) in numbers {
            text.add(family, labels, value);
        }
        // A count of the device, of which the first path stands for all.
        if row.number == 0 {
            text.add(&PATH_UNSERVED, [device], row.unserved);
        }
    }
}

const fn bytes_of_blocks(blocks: u64) -> u64 {
    blocks.saturating_mul(PAGE_BYTES as u64)
}
