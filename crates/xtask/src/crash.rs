//! `cargo xtask crash`: crash consistency tests with real processes, over disks that lose unsynced
//! data.
//!
//! ```text
//!   workload, checker ── NBD ──▶ tenmil serve volume:[mirror:[tcp:],[tcp:]]/v      the host
//!                                       └─ NVMe/TCP ──▶ tenmil serve file:disk-N/disk      targets A, B
//!                                                              └─ FUSE ──▶ disks, in this process
//! ```
//!
//! A world is one such stack on new disks; each of its rounds runs a workload, hits something at one
//! sync of a disk, starts again what was killed, flushes, and reads everything. What a flush has
//! covered has to be there, and nothing that was never written; a mirror of which one leg is hit
//! fails no request at all, and a host that was not killed recovers by itself.
//!
//! The test needs `/dev/fuse` and permission to mount, which it obtains in a mount namespace of its
//! own.

mod crash_test_stack;
mod fault_injected_disks;
mod nbd_client;
mod round_plan;
mod server_process;
mod volatile_cache_disk;
mod volume_model;
mod workload;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crash_test_stack::{CrashTestResources, CrashTestStack, EventTotals};
use fault_injected_disks::{FaultInjectedDisks, mount_disk};
use round_plan::{CrashEvent, DeviceStack, RoundPlan, SyncPositionIterator};
use server_process::ServerProcess;
use volume_model::ModelCounts;

/// Directory of all files.
const ROOM: &str = "target/crash";
/// Rounds per world.
const WORLD_ROUNDS: u64 = 20;
/// The exit status of a task that could not be run.
const NOT_RUN: i32 = 2;
/// Lines of a history that are printed; the file has all.
const LINES_SHOWN: usize = 60;

/// Options of `cargo xtask crash`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask crash                           100 rounds
  cargo xtask crash --rounds 500 --seed 7     those of seed 7
  cargo xtask crash --stack mirror --event power-all
  cargo xtask crash --seconds 50              as many as fit into 50 s
  cargo xtask crash --short                   one of each kind, about a minute
A failed round prints its history, which is kept in target/crash with what the processes printed.")]
pub(crate) struct CrashOptions {
    /// Number of rounds
    #[arg(long, default_value_t = 100)]
    rounds: u64,
    /// One round of each event on each stack, of seed 1 unless another one is named.
    #[arg(long, conflicts_with_all = ["rounds", "stack", "event"])]
    short: bool,
    /// What the rounds are drawn from; without it, from the clock.
    #[arg(long)]
    seed: Option<u64>,
    /// Start no round after this many seconds
    #[arg(long)]
    seconds: Option<u64>,
    /// Test this stack only: store, mirror or store-mirror
    #[arg(long, value_parser = round_plan::parse_stack)]
    stack: Option<DeviceStack>,
    /// Test this event only: kill-target, power-target, kill-host, kill-all, power-all, failed-sync,
    /// held-write or leg-then-all
    #[arg(long, value_parser = round_plan::parse_event)]
    event: Option<CrashEvent>,
    /// Stop after this many failed rounds
    #[arg(long, default_value_t = 5)]
    failures: usize,
    /// The tenmil program
    #[arg(long, value_name = "PATH", default_value = "target/debug/tenmil")]
    binary: PathBuf,
    /// Print the summary as JSON
    #[arg(long)]
    json: bool,
    /// Disks complete syncs without executing them: to see that the rounds with a power loss fail
    #[arg(long)]
    ignore_syncs: bool,
    /// Print the history of every round
    #[arg(long)]
    verbose: bool,
    /// Runs in a mount namespace of its own already
    #[arg(long, hide = true)]
    inside: bool,
}

/// Results of the rounds.
#[derive(Debug, Default)]
struct CrashSummary {
    rounds: u64,
    failed: Vec<String>,
    /// Number of rounds by stack and event.
    kinds: BTreeMap<(&'static str, &'static str), u64>,
    totals: EventTotals,
    longest_s: f32,
}

/// Runs the rounds; returns true if no data were lost.
pub(crate) fn run_crash_tests(options: &CrashOptions) -> Result<bool, String> {
    if !Path::new("/dev/fuse").exists() {
        return Err("look for /dev/fuse: it is not there; load the module: modprobe fuse".into());
    }
    if !options.inside {
        return run_in_mount_namespace();
    }
    let tenmil = &options.binary;
    let tenmil =
        tenmil.canonicalize().map_err(|why| format!("find {}: {why}", tenmil.display()))?;
    let directory = PathBuf::from(ROOM);
    let refuse = |why| format!("make {ROOM}: {why}");
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir_all(&directory).map_err(refuse)?;
    let absolute_directory = directory.canonicalize().map_err(refuse)?;
    let seed = options.seed.unwrap_or_else(|| if options.short { 1 } else { random_seed() });
    let disks = Arc::new(Mutex::new(FaultInjectedDisks::new(2, seed, options.ignore_syncs)));
    let mounts = (0..2)
        .map(|disk| mount_disk(&disks, disk, &absolute_directory.join(format!("disk-{disk}"))));
    let _mounts: Vec<crate::fuse_mount::FuseMount> = mounts.collect::<Result<_, _>>()?;
    let servers =
        ["target-a", "target-b", "host"].map(|name| ServerProcess::new(name, &absolute_directory));
    let place = CrashTestResources {
        tenmil,
        directory,
        absolute_directory,
        disks,
        servers: servers.to_vec(),
    };
    println!("crash: seed {seed}");
    let summary = run_rounds(options, &place, seed);
    for server in place.servers.iter().rev() {
        server.kill_and_reap();
    }
    print_summary(options, seed, &summary);
    Ok(summary.failed.is_empty())
}

/// Runs this command again in a mount namespace of its own, as root of a user namespace if necessary.
fn run_in_mount_namespace() -> Result<bool, String> {
    let this = std::env::current_exe().map_err(|why| format!("find this program: {why}"))?;
    let unshared = || {
        let mut command = Command::new("unshare");
        if !is_root() {
            command.args(["--user", "--map-root-user"]);
        }
        command.args(["--mount", "--propagation", "private", "--kill-child"]);
        command
    };
    let refuse = |why| format!("run unshare (of util-linux): {why}");
    let tried = unshared().arg("true").output().map_err(|why| refuse(why.to_string()))?;
    if !tried.status.success() {
        return Err(refuse(String::from_utf8_lossy(&tried.stderr).trim().to_owned()));
    }
    let mut command = unshared();
    command.arg(this).args(std::env::args_os().skip(1)).arg("--inside");
    let status = command.status().map_err(|why| refuse(why.to_string()))?;
    match status.code() {
        Some(0) => Ok(true),
        Some(NOT_RUN) => {
            Err("it could not be run in a mount namespace of its own; see above".into())
        }
        // A panic, too.
        _ => Ok(false),
    }
}

fn is_root() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let user = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    user.and_then(|ids| ids.split_whitespace().nth(1)) == Some("0")
}

fn random_seed() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(1, |since| since.as_secs() % 1_000_000)
}

/// Where a round takes place, and at which event if that is not drawn. A world has an identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CrashRoundSelection {
    stack: DeviceStack,
    event: Option<CrashEvent>,
    identity: u64,
}

fn selected_rounds(options: &CrashOptions) -> Vec<CrashRoundSelection> {
    if options.short {
        let each = |stack: DeviceStack| {
            let course =
                move |event| CrashRoundSelection { stack, event: Some(event), identity: 0 };
            stack.possible_events().map(course)
        };
        return DeviceStack::ALL.into_iter().flat_map(each).collect();
    }
    let course = |round: u64| {
        let world = round / WORLD_ROUNDS;
        let drawn = DeviceStack::ALL[usize::try_from(world).unwrap_or(0) % DeviceStack::ALL.len()];
        let stack = options.stack.unwrap_or(drawn);
        // Worlds in a row on one stack are new ones, too.
        let identity = if options.stack.is_some() { world } else { world / 3 };
        CrashRoundSelection { stack, event: options.event, identity }
    };
    (0..options.rounds).map(course).collect()
}

fn run_rounds(options: &CrashOptions, place: &CrashTestResources, seed: u64) -> CrashSummary {
    let begun = Instant::now();
    let mut summary = CrashSummary::default();
    let mut walk = SyncPositionIterator::default();
    let mut world: Option<CrashTestStack> = None;
    let mut is_over = false;
    for (round, CrashRoundSelection { stack, event, identity }) in
        (0..).zip(selected_rounds(options))
    {
        if world.as_ref().is_none_or(|world| !world.matches_stack(stack, (seed << 20) + identity)) {
            if let Some(world) = world.take() {
                end_world(world, round, &mut summary);
            }
            match CrashTestStack::new(place, stack, (seed << 20) + identity) {
                Ok(made) => world = Some(made),
                Err(why) => {
                    println!("before round {round}: FAILED: {why}");
                    summary.failed.push(format!("before round {round}: {why}"));
                    break;
                }
            }
        }
        let Some(mut current) = world.take() else { continue };
        let plan = walk.plan_round(seed, round, stack, event);
        let one = Instant::now();
        let ended = current.run_round(&plan);
        let seconds = one.elapsed().as_secs_f32();
        walk.record_syncs(stack, current.syncs_max());
        summary.count_round(&plan, seconds);
        let mark = if ended.is_ok() { "ok" } else { "FAILED" };
        println!("{plan}: {mark}, {seconds:.1} s");
        if options.verbose {
            current.history_lines().iter().for_each(|line| println!("  {line}"));
        }
        match ended {
            Ok(()) => world = Some(current),
            // A world is not reused after a failure.
            Err(why) => report_failed_round(place, &plan, &current, &why, &mut summary),
        }
        let late = options.seconds.is_some_and(|most| begun.elapsed().as_secs() >= most);
        is_over = late || summary.failed.len() >= options.failures;
        if is_over {
            break;
        }
    }
    if let Some(world) = world {
        end_world(world, summary.rounds, &mut summary);
    }
    if is_over && summary.failed.is_empty() {
        println!("crash: the time is over");
    }
    summary
}

fn end_world(world: CrashTestStack, round: u64, summary: &mut CrashSummary) {
    summary.totals.merge_totals(&world.event_totals());
    if let Err(why) = world.stop_and_check() {
        println!("after round {round}: FAILED: {why}");
        summary.failed.push(format!("after round {round}: {why}"));
    }
}

/// Prints the report of a failed round and saves its files.
fn report_failed_round(
    place: &CrashTestResources,
    plan: &RoundPlan,
    world: &CrashTestStack,
    why: &str,
    summary: &mut CrashSummary,
) {
    summary.totals.merge_totals(&world.event_totals());
    println!("  {why}");
    let history = world.history_lines();
    let skipped = history.len().saturating_sub(LINES_SHOWN);
    if skipped > 0 {
        println!("  … {skipped} lines before");
    }
    history[skipped..].iter().for_each(|line| println!("  {line}"));
    let keep = place.directory.join(format!("round-{}", plan.round));
    let _ = std::fs::create_dir_all(&keep);
    let text = format!("{plan}\n{why}\n{}\n", history.join("\n"));
    let _ = std::fs::write(keep.join("history"), text);
    for server in &place.servers {
        server.keep_output(&keep);
        let last = server.stderr_tail();
        last.iter().for_each(|line| println!("  {}: {line}", server.process_name()));
    }
    println!("  kept in {}", keep.display());
    for server in place.servers.iter().rev() {
        server.kill_and_reap();
    }
    summary.failed.push(format!("{plan}: {why}"));
}

impl CrashSummary {
    fn count_round(&mut self, plan: &RoundPlan, seconds: f32) {
        self.rounds += 1;
        *self.kinds.entry((plan.stack.name(), plan.event.name())).or_default() += 1;
        self.longest_s = self.longest_s.max(seconds);
    }
}

fn print_summary(options: &CrashOptions, seed: u64, summary: &CrashSummary) {
    let CrashSummary { rounds, failed, kinds, totals, longest_s } = summary;
    let ModelCounts { flushes, flushed_blocks, checked_sectors } = totals.model;
    let EventTotals { kills, losses, unsynced_sectors, at_request, after_workload, .. } = totals;
    if options.json {
        let kinds = kinds.iter().map(|((stack, event), count)| {
            serde_json::json!({ "stack": stack, "event": event, "rounds": count })
        });
        let kinds = kinds.collect::<Vec<_>>();
        let summary = serde_json::json!({
            "seed": seed, "rounds": rounds, "failed": failed, "kinds": kinds,
            "longest_s": longest_s, "kills": kills, "power_losses": losses,
            "unsynced_sectors": unsynced_sectors, "events_at_request": at_request,
            "events_after_workload": after_workload, "flushes": flushes,
            "flushed_blocks": flushed_blocks, "checked_sectors": checked_sectors,
            "longest_sync_s": totals.sync_wait_max_s,
        });
        println!("{summary}");
        return;
    }
    let failures = failed.len();
    println!(
        "\ncrash: seed {seed}, {rounds} rounds, {failures} failed; the longest took {longest_s:.1} s"
    );
    println!(
        "  {kills} processes killed; {losses} disks lost power or a sync, with {unsynced_sectors} sectors not \
         synced; {at_request} events at their request, {after_workload} after the workload"
    );
    println!(
        "  {flushes} flushes and forced writes succeeded, of {flushed_blocks} blocks; {checked_sectors} reads \
         of sectors with flushed data; a mirror was whole again after at most {:.1} s",
        totals.sync_wait_max_s
    );
    failed.iter().for_each(|what| println!("  {what}"));
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::Parser;

    use super::round_plan::{DeviceStack, parse_event};
    use super::{CrashOptions, CrashRoundSelection, WORLD_ROUNDS, selected_rounds};

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        options: CrashOptions,
    }

    fn parse_options(words: &[&str]) -> Vec<CrashRoundSelection> {
        let words = std::iter::once(&"crash").chain(words);
        selected_rounds(&Line::try_parse_from(words).unwrap().options)
    }

    #[test]
    fn short_run_has_each_event_on_each_stack_once() {
        let courses = parse_options(&["--short"]);
        let kinds: BTreeSet<_> = courses.iter().map(|it| (it.stack, it.event.unwrap())).collect();
        assert_eq!((courses.len(), kinds.len()), (23, 23));
        assert!(!kinds.contains(&(DeviceStack::Store, parse_event("leg-then-all").unwrap())));
        let worlds: BTreeSet<_> = courses.iter().map(|it| (it.stack, it.identity)).collect();
        assert_eq!(worlds.len(), 3, "each stack is made once");
    }

    #[test]
    fn disks_are_replaced_after_the_rounds_of_a_world() {
        for words in [&["--rounds", "200"][..], &["--rounds", "200", "--stack", "mirror"]] {
            let courses = parse_options(words);
            let worlds = |at: usize| (courses[at].stack, courses[at].identity);
            let news: Vec<usize> = (1..200).filter(|at| worlds(*at) != worlds(*at - 1)).collect();
            let rounds = usize::try_from(WORLD_ROUNDS).unwrap();
            assert_eq!(news, (1..200).filter(|at| at % rounds == 0).collect::<Vec<_>>());
        }
    }
}
