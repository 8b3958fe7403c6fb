//! Faults, one in each round.

use std::thread::sleep;
use std::time::Duration;

use serde_json::Value;

use super::gateways::{Gateways, NAMES};
use super::services::ServiceKind;

/// Fault of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Fault {
    /// A gateway is killed, and started again
    Kill,
    /// A gateway is stopped (SIGSTOP) beyond its lease, and goes on (SIGCONT)
    Pause,
    /// A gateway is cut off from etcd beyond its lease (not with Ceph)
    CutOff,
    /// A gateway is drained, and rebalanced
    Drain,
    /// All gateways are ended and started again, one after the other
    RollingRestart,
    /// The store does not answer beyond the lease: etcd is killed and started again, the OSD stopped and continued
    StoreLoss,
}

/// Time of the load before the fault, and after it.
const BEFORE: Duration = Duration::from_secs(2);
const LOAD_SECONDS: u32 = 16;
/// Longest I/O of any round, and of the median of a fault of one gateway.
const LONGEST_MAX_NS: u64 = 15_000_000_000;
const MEDIAN_MAX_NS: u64 = 5_000_000_000;
/// Time for which the store is lost.
const OUTAGE: Duration = Duration::from_secs(5);
/// Time beyond a lease.
const BEYOND_LEASE: Duration = Duration::from_secs(6);

impl Fault {
    pub(super) const ALL: [Self; 6] =
        [Self::Kill, Self::Pause, Self::CutOff, Self::Drain, Self::RollingRestart, Self::StoreLoss];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Kill => "a gateway is killed",
            Self::Pause => "a gateway is paused",
            Self::CutOff => "a gateway is cut off from etcd",
            Self::Drain => "a gateway is drained",
            Self::RollingRestart => "the gateways are restarted",
            Self::StoreLoss => "the store is lost",
        }
    }

    /// Whether these services have what the fault hits.
    pub(super) fn is_possible_with(self, kind: ServiceKind) -> bool {
        self != Self::CutOff || kind != ServiceKind::Ceph
    }
}

/// Runs a round. Returns the longest I/O in nanoseconds.
pub(super) fn run_fault(gateways: &mut Gateways, fault: Fault, seed: u64) -> Result<u64, String> {
    gateways.wait_until_whole()?;
    let before = count_blocklisted(gateways)?;
    let load = gateways.start_load(LOAD_SECONDS)?;
    sleep(BEFORE);
    // The owner of one of the groups: a gateway without a group would not be missed.
    let group = 1 + seed % 2;
    let hit = gateways.owner_of(group).ok_or("no gateway owns the ANA group, expected one")?;
    let is_lease_lost = match fault {
        Fault::Kill => {
            gateways.kill_gateway(hit);
            sleep(BEYOND_LEASE);
            gateways.start_gateway(hit)?;
            true
        }
        Fault::Pause => {
            gateways.signal_gateway(hit, "STOP")?;
            sleep(BEYOND_LEASE);
            gateways.signal_gateway(hit, "CONT")?;
            await_lost_lease(gateways, hit)
        }
        Fault::CutOff => {
            gateways.set_cut(hit, true);
            sleep(BEYOND_LEASE);
            gateways.set_cut(hit, false);
            await_lost_lease(gateways, hit)
        }
        Fault::Drain => {
            gateways.set_draining(hit, true)?;
            await_other_owner(gateways, group, hit)?;
            gateways.set_draining(hit, false)?;
            true
        }
        Fault::RollingRestart => {
            for at in 0..NAMES.len() {
                gateways.stop_gateway(at)?;
                gateways.start_gateway(at)?;
                gateways.wait_until_whole()?;
            }
            true
        }
        Fault::StoreLoss => {
            gateways.interrupt_store(OUTAGE)?;
            await_lost_lease(gateways, hit)
        }
    };
    let report = load.wait(Duration::from_secs(u64::from(LOAD_SECONDS) + 45))?;
    if !is_lease_lost {
        return Err(format!("gateway {} has not noticed that its lease is lost", NAMES[hit]));
    }
    if gateways.has_images() && matches!(fault, Fault::Kill | Fault::Pause) {
        check_fenced(gateways, before)?;
    }
    longest_io(&report)
}

/// Checks that a client was blocklisted since there were `before`.
fn check_fenced(gateways: &Gateways, before: usize) -> Result<(), String> {
    let after = count_blocklisted(gateways)?;
    if after > before {
        return Ok(());
    }
    Err(format!("{after} clients are blocklisted as before, expected the former owner, too"))
}

fn count_blocklisted(gateways: &Gateways) -> Result<usize, String> {
    Ok(gateways.blocklist()?.lines().count())
}

/// Checks the report of the load. Returns the longest I/O in nanoseconds.
fn longest_io(report: &str) -> Result<u64, String> {
    let report: Value = serde_json::from_str(report).map_err(|why| format!("report: {why}"))?;
    let verified = &report["verified"];
    let bad = ["foreign_blocks", "misplaced_blocks", "stale_blocks", "torn_blocks"];
    if report["errors"] != 0 || bad.iter().any(|kind| verified[kind] != 0) {
        return Err(format!("{} errors, blocks: {verified}", report["errors"]));
    }
    if verified["good_blocks"].as_u64().is_none_or(|count| count == 0) {
        return Err(format!("nothing was verified: {verified}"));
    }
    let longest = report["latency_ns"]["max"].as_u64().ok_or("report: no longest latency")?;
    check_limit(longest, LONGEST_MAX_NS)
}

/// Checks the median of the longest I/Os of all rounds, and returns a text with it. While the store is lost no gateway
/// serves, so that median has the limit of a round.
pub(super) fn check_median(fault: Fault, mut longest: Vec<u64>) -> Result<String, String> {
    longest.sort_unstable();
    let median = *longest.get(longest.len() / 2).ok_or("no round has passed")?;
    let limit = if fault == Fault::StoreLoss { LONGEST_MAX_NS } else { MEDIAN_MAX_NS };
    check_limit(median, limit)?;
    let most = longest.last().copied().unwrap_or_default();
    let (median, most) = (median / 1_000_000, most / 1_000_000);
    Ok(format!("{median} ms, and {most} ms at most, in {} rounds", longest.len()))
}

fn check_limit(longest_ns: u64, limit_ns: u64) -> Result<u64, String> {
    if longest_ns <= limit_ns {
        return Ok(longest_ns);
    }
    let (longest, limit) = (longest_ns / 1_000_000, limit_ns / 1_000_000);
    Err(format!("the longest I/O took {longest} ms, expected {limit} ms at most"))
}

fn await_lost_lease(gateways: &Gateways, at: usize) -> bool {
    await_true(|| gateways.log_of(at).contains("the lease is lost"))
}

fn await_other_owner(gateways: &Gateways, group: u64, before: usize) -> Result<(), String> {
    let is_other = || gateways.owner_of(group).is_some_and(|owner| owner != before);
    match await_true(is_other) {
        true => Ok(()),
        false => Err(format!("{} still owns ANA group {group}", NAMES[before])),
    }
}

fn await_true(is_true: impl Fn() -> bool) -> bool {
    for _ in 0..50 {
        if is_true() {
            return true;
        }
        sleep(Duration::from_millis(100));
    }
    false
}
