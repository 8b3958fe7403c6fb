//! World: one stack of real processes over disks that lose power, used for several rounds.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::fault_injected_disks::{FiredTrap, SharedDisks, SyncTrap, TrapPoint, lock};
use super::nbd_client::NbdClient;
use super::round_plan::{CrashEvent, DeviceStack, RoundPlan};
use super::server_process::{ServerProcess, run_tenmil, run_tenmil_successfully};
use super::volume_model::{BLOCK_BYTES, ModelCounts, VolumeModel};
use super::workload::{self, WorkloadEnd};

const DISK_BYTES: u64 = 32 << 20;
const VOLUME_BYTES: usize = 8 << 20;
/// Size of the mirror's metadata at the start of each leg.
const MIRROR_BYTES: usize = 1 << 20;
/// What a target says that cannot have its file yet.
const STILL_OPEN: &str = "the kernel has not done its I/O yet";
/// How long that may last: the kernel closes the files of a killed process in threads of its own, which on a
/// busy machine were seen not to run for 25 s.
const START_MAX: Duration = Duration::from_secs(120);
const NQN: &str = "nqn.2026-01.org.tenmil:disk";
/// Keep-alive time of the host (keep-alive-timeout) in seconds.
const KEEP_ALIVE_S: u64 = 1;
/// How long after a loss the host reconnects, if a write was in flight: three keep-alive times and the Command
/// Quiesce Time of `tenmil serve`, 1 s (NVMe Base 2.1, 9.6); the next attempt is at most 1 s later.
const RECONNECT_MAX_S: u64 = 3 * KEEP_ALIVE_S + 1 + 1;
/// Time limit for both legs of a mirror to be in sync again, from the time at which the targets run. A reconnect;
/// a probe of a stale leg, each second; the copy, a second one if the leg has lost writes; twice for the two
/// legs, one after the other. The other half is for a busy machine.
const SYNC_MAX: Duration = Duration::from_secs(2 * 2 * (RECONNECT_MAX_S + 1 + 2));
/// How long a store may take until it answers flushes again by itself: its first recovery begins at once or
/// after 2 s, a path is tried again every second, and what the path then reports as lost takes a second
/// recovery 2 s later. The rest is for a busy machine.
const RECOVER_MAX: Duration = Duration::from_secs(20);

/// Paths and processes that a world uses.
#[derive(Clone, Debug)]
pub(super) struct CrashTestResources {
    pub(super) tenmil: PathBuf,
    /// Path relative to the working directory.
    pub(super) directory: PathBuf,
    pub(super) absolute_directory: PathBuf,
    pub(super) disks: SharedDisks,
    pub(super) servers: Vec<ServerProcess>,
}

/// Index of the process that has the volume or the mirror open.
const HOST: usize = 2;

/// Stack of processes with its model.
#[derive(Debug)]
pub(super) struct CrashTestStack {
    place: CrashTestResources,
    stack: DeviceStack,
    identity: u64,
    addresses: Vec<String>,
    /// Fast I/O fail timeout of the host in seconds: a mirror drops a missing leg after it.
    fail_fast_s: u64,
    /// URI of the device exported over NBD.
    uri: String,
    pub(super) model: VolumeModel,
    client: Option<NbdClient>,
    history: RoundHistory,
    snapshots: u64,
    totals: EventTotals,
}

/// Counts of what the rounds did, by which the test shows that it tested something.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EventTotals {
    /// Processes that were killed.
    pub(super) kills: usize,
    /// Disks that lost power or unsynced data.
    pub(super) losses: usize,
    /// Sectors of those disks that were not synced.
    pub(super) unsynced_sectors: usize,
    /// Events at their request, and events after the workload, which had fewer requests.
    pub(super) at_request: usize,
    pub(super) after_workload: usize,
    pub(super) model: ModelCounts,
    /// Longest wait for both legs of a mirror to be in sync.
    pub(super) sync_wait_max_s: f32,
}

impl EventTotals {
    fn count_fired(&mut self, fired: &FiredTrap) {
        let FiredTrap { unsynced, kills, losses, at_request, .. } = *fired;
        self.kills += kills;
        self.losses += losses;
        self.unsynced_sectors += unsynced;
        self.at_request += usize::from(at_request);
        self.after_workload += usize::from(!at_request);
    }

    /// Adds those of another world.
    pub(super) fn merge_totals(&mut self, other: &Self) {
        self.kills += other.kills;
        self.losses += other.losses;
        self.unsynced_sectors += other.unsynced_sectors;
        self.at_request += other.at_request;
        self.after_workload += other.after_workload;
        self.model.flushes += other.model.flushes;
        self.model.flushed_blocks += other.model.flushed_blocks;
        self.model.checked_sectors += other.model.checked_sectors;
        self.sync_wait_max_s = self.sync_wait_max_s.max(other.sync_wait_max_s);
    }
}

/// Events of a round.
#[derive(Debug)]
pub(super) struct RoundHistory {
    begun: Instant,
    pub(super) lines: Vec<String>,
}

impl RoundHistory {
    fn new() -> Self {
        Self { begun: Instant::now(), lines: Vec::new() }
    }

    pub(super) fn add_entry(&mut self, what: &str) {
        self.add_entry_at(Instant::now(), what);
    }

    fn add_entry_at(&mut self, when: Instant, what: &str) {
        let seconds = when.saturating_duration_since(self.begun).as_secs_f32();
        self.lines.push(format!("{seconds:8.3}  {what}"));
    }
}

impl CrashTestStack {
    /// Creates the stack on new disks.
    pub(super) fn new(
        place: &CrashTestResources,
        stack: DeviceStack,
        identity: u64,
    ) -> Result<Self, String> {
        lock(&place.disks).replace_all();
        let model = VolumeModel::new(identity, VOLUME_BYTES / BLOCK_BYTES);
        let mut world = Self {
            place: place.clone(),
            stack,
            identity,
            addresses: Vec::new(),
            // A leg that is back within 4 s is dropped in one half of the worlds only.
            fail_fast_s: if stack.target_count() == 1 { 30 } else { 2 + identity % 2 * 6 },
            uri: String::new(),
            model,
            client: None,
            history: RoundHistory::new(),
            snapshots: 0,
            totals: EventTotals::default(),
        };
        for target in 0..stack.target_count() {
            // Each target has an address of its own, so that no client socket takes its port during a
            // restart.
            let listen = format!("tcp://127.0.0.{}:0", target + 2);
            let disk = format!("file:disk-{target}/disk?size={DISK_BYTES}&block=4k");
            let ready = world.start_server(target, &disk, &listen)?;
            let address = ready["listen"][0].as_str().unwrap_or_default();
            world.addresses.push(address.to_owned());
        }
        let device = world.device_uri();
        if stack.target_count() > 1 {
            let legs: Vec<String> = (0..2).map(|leg| world.leg_uri(leg)).collect();
            world.run_tenmil(&["mirror", "create", "--overwrite", &legs[0], &legs[1]])?;
        }
        world.uri = device.clone();
        if stack.has_pool() {
            world.run_tenmil(&["pool", "create", "--overwrite", &device])?;
            world.uri = format!("volume:[{device}]/v");
            let size = VOLUME_BYTES.to_string();
            world.run_tenmil(&["volume", "create", &world.uri, "--size", &size])?;
        }
        world.start_host()?;
        world.wait_in_sync()?;
        Ok(world)
    }

    /// Whether it is this one.
    pub(super) fn matches_stack(&self, stack: DeviceStack, identity: u64) -> bool {
        (self.stack, self.identity) == (stack, identity)
    }

    fn leg_uri(&self, target: usize) -> String {
        format!(
            "{}/{NQN}?keep-alive-timeout={KEEP_ALIVE_S}s&fast-io-fail-timeout={}s",
            self.addresses[target], self.fail_fast_s
        )
    }

    /// The same device for commands that look at it while no host has it: with the default timeouts, which a
    /// busy machine keeps.
    fn device_uri_with_default_timeouts(&self) -> String {
        let leg = |target: usize| format!("{}/{NQN}", self.addresses[target]);
        match self.stack {
            DeviceStack::Store => leg(0),
            _ => format!("mirror:[{}],[{}]", leg(0), leg(1)),
        }
    }

    /// URI of the device below the pool or the NBD export.
    fn device_uri(&self) -> String {
        match self.stack {
            DeviceStack::Store => self.leg_uri(0),
            _ => format!("mirror:[{}],[{}]", self.leg_uri(0), self.leg_uri(1)),
        }
    }

    fn run_tenmil(&self, arguments: &[&str]) -> Result<String, String> {
        run_tenmil_successfully(&self.place.tenmil, &self.place.absolute_directory, arguments)
    }

    fn start_server(&self, server: usize, uri: &str, listen: &str) -> Result<Value, String> {
        let arguments = [uri, "--listen", listen, "--buffer-memory", "32m"];
        let arguments = if server == HOST { &arguments[..3] } else { &arguments[..] };
        let arguments: Vec<String> = arguments.iter().map(|word| (*word).to_owned()).collect();
        self.place.servers[server].start(&self.place.tenmil, &arguments)
    }

    fn start_target(&mut self, target: usize) -> Result<(), String> {
        let disk = format!("file:disk-{target}/disk?block=4k");
        let begun = Instant::now();
        while let Err(why) = self.start_server(target, &disk, &self.addresses[target]) {
            // The kernel closes the file of a killed process when its last I/O has ended, on a busy machine
            // later than the process that follows waits for.
            if !why.contains(STILL_OPEN) || begun.elapsed() > START_MAX {
                return Err(why);
            }
            self.history.add_entry(&format!("target {target} is started again: {why}"));
        }
        self.history.add_entry(&format!("target {} is back", ["A", "B"][target]));
        Ok(())
    }

    fn start_host(&mut self) -> Result<(), String> {
        self.client = None;
        self.start_server(HOST, &self.uri, "nbd:host.sock")?;
        let client = NbdClient::connect(&self.place.directory.join("host.sock"));
        self.client = Some(client.map_err(|why| format!("connect to the host: {}", why.0))?);
        self.history.add_entry("the host is up");
        Ok(())
    }

    /// Runs one round. The error names the failure; [`CrashTestStack::history_lines`] has the details.
    pub(super) fn run_round(&mut self, plan: &RoundPlan) -> Result<(), String> {
        self.history = RoundHistory::new();
        self.history.add_entry(&plan.to_string());
        lock(&self.place.disks).set_traps(self.traps_of_plan(plan));
        let mut snapshot = None;
        let ended = self.run_workload(plan, &mut snapshot)?;
        // Traps whose request number was not reached fire now, so that no round is without its event.
        let left = lock(&self.place.disks).fire_remaining();
        if left > 0 {
            let text = format!("{left} traps of later requests spring now, or at the next sync");
            self.history.add_entry(&text);
            if plan.event == CrashEvent::FailedSync {
                self.flush_before_restart(plan)?;
            }
        }
        let kept = match snapshot {
            Some(snapshot) => self.end_snapshot(snapshot)?,
            None => false,
        };
        let recovered = self.restart_all(plan, ended);
        self.count_fired(plan);
        recovered?;
        self.verify_content(plan)?;
        self.wait_in_sync()?;
        if plan.snapshot {
            self.check_snapshot(kept)?;
        }
        Ok(())
    }

    /// Flushes, so that the sync fails before its target is restarted, which acknowledges that.
    fn flush_before_restart(&mut self, plan: &RoundPlan) -> Result<(), String> {
        let Some(client) = &mut self.client else { return Ok(()) };
        let answer = workload::flush_export(client, &mut self.model)?;
        self.history.add_entry(&format!("flush: {}", workload::reply_text(&answer)));
        lock(&self.place.disks).clear_traps();
        match plan.must_lose_nothing() && answer.is_err() {
            true => Err("a flush fails though one leg has everything".into()),
            false => Ok(()),
        }
    }

    fn count_fired(&mut self, plan: &RoundPlan) {
        for fired in lock(&self.place.disks).fired.clone() {
            self.totals.count_fired(&fired);
            let FiredTrap { when, unsynced, .. } = fired;
            let what = format!("{} ({unsynced} sectors not synced)", plan.event.name());
            self.history.add_entry_at(when, &what);
        }
    }

    pub(super) fn history_lines(&self) -> &[String] {
        &self.history.lines
    }

    /// What its rounds did.
    pub(super) fn event_totals(&self) -> EventTotals {
        EventTotals { model: self.model.counts, ..self.totals }
    }

    /// Maximum number of syncs of one disk in the last round.
    pub(super) fn syncs_max(&self) -> u64 {
        let disks = lock(&self.place.disks);
        (0..self.stack.target_count()).map(|disk| disks.syncs_of_round(disk)).max().unwrap_or(0)
    }

    fn traps_of_plan(&self, plan: &RoundPlan) -> Vec<SyncTrap> {
        let servers = &self.place.servers;
        let (leg, keep, at) = (plan.leg, plan.keep, plan.at);
        let moment = if plan.after { TrapPoint::AfterSync } else { TrapPoint::BeforeSync };
        let everybody = || servers.iter().rev().cloned().collect();
        let all: Vec<usize> = (0..self.stack.target_count()).collect();
        let trap = |kill, lose| SyncTrap { disk: leg, at, moment, kill, lose, keep };
        let target = || vec![servers[leg].clone()];
        match plan.event {
            CrashEvent::KillTarget => vec![trap(target(), vec![])],
            CrashEvent::PowerTarget => vec![trap(target(), vec![leg])],
            CrashEvent::KillHost => vec![trap(vec![servers[HOST].clone()], vec![])],
            CrashEvent::KillAll => vec![trap(everybody(), vec![])],
            CrashEvent::PowerAll => vec![trap(everybody(), all)],
            CrashEvent::FailedSync => {
                vec![SyncTrap { moment: TrapPoint::FailedSync, ..trap(vec![], vec![leg]) }]
            }
            CrashEvent::HeldWrite => {
                let moment = TrapPoint::HeldWrite(300 + plan.back_after_ms * 2);
                vec![SyncTrap { moment, ..trap(vec![servers[HOST].clone()], vec![]) }]
            }
            CrashEvent::LegThenAll => {
                let rest = SyncTrap { disk: 1 - leg, at: plan.then_at, ..trap(everybody(), all) };
                vec![trap(target(), vec![leg]), rest]
            }
        }
    }

    /// Runs the workload, and restarts targets meanwhile.
    fn run_workload(
        &mut self,
        plan: &RoundPlan,
        snapshot: &mut Option<PendingSnapshot>,
    ) -> Result<WorkloadEnd, String> {
        let Some(mut client) = self.client.take() else { return Err("no connection".into()) };
        let mut load = workload::CrashWorkload::new(plan);
        let mut is_back = false;
        let ended = loop {
            let fired = lock(&self.place.disks).fired.first().map(|fired| fired.when);
            if plan.snapshot && snapshot.is_none() && load.is_half_done() && fired.is_none() {
                *snapshot = Some(self.begin_snapshot()?);
            }
            if let Some(fired) = fired.filter(|_| !is_back && !plan.event.kills_host())
                && fired.elapsed() >= Duration::from_millis(plan.back_after_ms)
            {
                is_back = true;
                self.restart_target(plan)?;
            }
            let disks = &self.place.disks;
            let exact = || plan.must_lose_nothing() || lock(disks).fired.is_empty();
            let (model, history) = (&mut self.model, &mut self.history);
            if let Some(ended) = load.submit_and_receive(&mut client, model, history, &exact)? {
                break ended;
            }
        };
        if ended != WorkloadEnd::Gone {
            self.client = Some(client);
        }
        Ok(ended)
    }

    /// Restarts the affected target.
    fn restart_target(&mut self, plan: &RoundPlan) -> Result<(), String> {
        if plan.event == CrashEvent::FailedSync {
            // The operator acknowledges the loss of data by restarting the target.
            self.place.servers[plan.leg].terminate(Duration::from_secs(8));
        }
        self.start_target(plan.leg)
    }

    /// Restarts all processes, and waits for a flush to succeed.
    fn restart_all(&mut self, plan: &RoundPlan, ended: WorkloadEnd) -> Result<(), String> {
        for target in 0..self.stack.target_count() {
            if !self.place.servers[target].is_running() {
                self.start_target(target)?;
            } else if plan.event == CrashEvent::FailedSync
                && target == plan.leg
                && !self.was_target_restarted()
            {
                self.restart_target(plan)?;
            }
        }
        if ended == WorkloadEnd::Gone || !self.place.servers[HOST].is_running() {
            if !plan.event.kills_host() {
                return Err("the host has ended or closed the connection".into());
            }
            self.model.mark_doubtful();
            self.start_host()?;
        }
        if self.await_flush(plan)? {
            return Ok(());
        }
        Err(match plan.must_lose_nothing() {
            true => "a flush fails though one leg has everything".into(),
            false => format!(
                "no flush succeeds within {RECOVER_MAX:?}, expected the host to recover by itself"
            ),
        })
    }

    /// Whether a target was restarted in this round.
    fn was_target_restarted(&self) -> bool {
        self.history.lines.iter().any(|line| line.ends_with("is back"))
    }

    /// Whether a flush succeeds within a time limit.
    fn await_flush(&mut self, plan: &RoundPlan) -> Result<bool, String> {
        let Some(client) = &mut self.client else { return Err("no connection".into()) };
        let begun = Instant::now();
        loop {
            let answer = workload::flush_export(client, &mut self.model)?;
            self.history.add_entry(&format!("flush: {}", workload::reply_text(&answer)));
            if answer.is_ok() {
                return Ok(true);
            }
            if plan.must_lose_nothing() || begun.elapsed() > RECOVER_MAX {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Reads everything several times, in pieces of several sizes.
    fn verify_content(&mut self, plan: &RoundPlan) -> Result<(), String> {
        let Some(client) = &mut self.client else { return Err("no connection".into()) };
        let mut first: Option<Vec<u8>> = None;
        for piece in [1 << 20, 256 << 10, 64 << 10] {
            let bytes = workload::read_all(client, VOLUME_BYTES, piece)?;
            let wrong = self.model.check_read(0, &bytes, plan.must_lose_nothing());
            if let Some(first) = wrong.first() {
                return Err(workload::wrong_sectors_text(&wrong, first));
            }
            if let Some(first) = &first
                && let Some(at) = (0..bytes.len()).find(|at| bytes[*at] != first[*at])
            {
                return Err(format!("block {}: two reads differ", at / BLOCK_BYTES));
            }
            first = Some(bytes);
        }
        self.model.adopt_read_data(0, &first.unwrap_or_default());
        self.history.add_entry("everything was read and is right");
        Ok(())
    }

    /// Waits until the legs of a mirror are in sync.
    fn wait_in_sync(&mut self) -> Result<(), String> {
        if self.stack.target_count() == 1 {
            return Ok(());
        }
        let pid = self.place.servers[HOST].pid().unwrap_or_default().to_string();
        let begun = Instant::now();
        loop {
            let said = self.run_tenmil(&["get", "mirrors", "--pid", &pid, "--json"])?;
            let mirrors: Value = serde_json::from_str(&said).map_err(|why| why.to_string())?;
            let mirror = &mirrors[0];
            if mirror["legs_in_sync"] == 2 && mirror["left_regions"] == 0 {
                let seconds = begun.elapsed().as_secs_f32();
                self.history.add_entry(&format!("both legs are alike, after {seconds:.1} s"));
                self.totals.sync_wait_max_s = self.totals.sync_wait_max_s.max(seconds);
                return Ok(());
            }
            if begun.elapsed() > SYNC_MAX {
                return Err(not_in_sync_error(mirror));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn begin_snapshot(&mut self) -> Result<PendingSnapshot, String> {
        self.snapshots += 1;
        let name = format!("s{}", self.snapshots);
        self.history.add_entry(&format!("snapshot {name}: begun"));
        PendingSnapshot::start_snapshot(&self.place, &self.uri, name)
    }

    /// Waits for the snapshot; returns whether it was created.
    fn end_snapshot(&mut self, snapshot: PendingSnapshot) -> Result<bool, String> {
        let (made, said) = snapshot.await_end()?;
        self.history.add_entry(&format!("snapshot s{}: {said}", self.snapshots));
        Ok(made)
    }

    /// Checks that an acknowledged snapshot exists, and deletes it, so that the pool does not fill up.
    fn check_snapshot(&mut self, kept: bool) -> Result<(), String> {
        let device = self.device_uri();
        let listed = self.run_tenmil(&["volume", "list", &device, "--json"])?;
        let name = format!("s{}", self.snapshots);
        let is_there = listed.contains(&format!("\"{name}\""));
        if kept && !is_there {
            return Err(format!("snapshot {name} was acknowledged and is lost"));
        }
        if is_there {
            self.run_tenmil(&["volume", "delete", &format!("volume:[{device}]/{name}")])?;
        }
        Ok(())
    }

    /// Stops the host, checks the metadata of the pool, and compares the legs of a mirror.
    pub(super) fn stop_and_check(mut self) -> Result<(), String> {
        self.history.add_entry("the world ends");
        lock(&self.place.disks).clear_traps();
        self.client = None;
        if !self.place.servers[HOST].terminate(Duration::from_secs(8)) {
            return Err("the host is there 8 s after SIGTERM".into());
        }
        if self.stack.has_pool() {
            self.run_tenmil(&["pool", "check", &self.device_uri_with_default_timeouts()])?;
        }
        if self.stack.target_count() > 1 {
            let arguments = ["mirror", "show", &self.device_uri_with_default_timeouts()];
            let shown = run_tenmil(&self.place.tenmil, &self.place.absolute_directory, &arguments)?;
            if !shown.status.success() {
                let said = String::from_utf8_lossy(&shown.stdout).into_owned();
                return Err(format!("mirror show: {:?}: {said}", shown.status.code()));
            }
            let mut disks = lock(&self.place.disks);
            let legs = [disks.file_content(0, "disk"), disks.file_content(1, "disk")];
            let differs = |at: &usize| legs[0][*at] != legs[1][*at];
            if let Some(at) = (MIRROR_BYTES..legs[0].len()).find(differs) {
                return Err(format!("the legs differ at byte {at}"));
            }
        }
        Ok(())
    }
}

/// The error that names the legs that are not in sync.
fn not_in_sync_error(mirror: &Value) -> String {
    let legs = mirror["legs"].as_array().map(Vec::as_slice).unwrap_or_default();
    let named = |leg: &Value| {
        let target = if leg["number"] == 0 { "A" } else { "B" };
        format!("leg {} (target {target}) is {}", leg["number"], leg["state"])
    };
    let behind = legs.iter().filter(|leg| leg["state"] != "in sync").map(named);
    let behind = behind.collect::<Vec<_>>().join(", ");
    let left = &mirror["left_regions"];
    format!("the legs are not alike after {SYNC_MAX:?}: {behind}; {left} regions are left to copy")
}

/// Snapshot being created by another process.
#[derive(Debug)]
pub(super) struct PendingSnapshot {
    child: std::process::Child,
}

impl PendingSnapshot {
    fn start_snapshot(place: &CrashTestResources, uri: &str, name: String) -> Result<Self, String> {
        let mut command = std::process::Command::new(&place.tenmil);
        command.args(["volume", "snapshot", uri, &name]).current_dir(&place.absolute_directory);
        command.stdin(std::process::Stdio::null());
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        let child = command.spawn().map_err(|why| format!("begin a snapshot: {why}"))?;
        Ok(Self { child })
    }

    /// Returns whether it was created, and the output.
    fn await_end(self) -> Result<(bool, String), String> {
        let output = self.child.wait_with_output();
        let output = output.map_err(|why| format!("end a snapshot: {why}"))?;
        let said = if output.status.success() { output.stdout } else { output.stderr };
        let said = String::from_utf8_lossy(&said).lines().next().unwrap_or_default().to_owned();
        Ok((output.status.success(), said))
    }
}
