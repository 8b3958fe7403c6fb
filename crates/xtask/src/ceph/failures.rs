//! What happens to a device when the cluster, the client or another client fails.

use std::thread::sleep;
use std::time::Duration;

use super::checks::{expect_text, verification_of};
use super::cluster::Cluster;
use super::programs::{Programs, wait_for};
use crate::operate::Report;

/// Time that the OSD is down.
const OSD_DOWN: Duration = Duration::from_secs(3);
/// Time for a loss to be noticed by an idle device, which looks every five seconds.
const LOSS_MAX: Duration = Duration::from_secs(15);
/// Time for the monitor to see that the OSD is full, or has room.
const FULL_MAX: Duration = Duration::from_secs(40);

/// Checks the failures that docs/operator/ceph.md lists.
pub(super) fn check_failures(
    programs: &Programs,
    cluster: &mut Cluster,
    report: &mut Report,
) -> Result<(), String> {
    for name in ["failures", "other", "empty"] {
        programs.run(&["volume", "create", &cluster.uri(name, ""), "--size", "32m"])?;
    }
    check_killed_osd(programs, cluster, report)?;
    check_full(programs, cluster, report)?;
    check_two_writers(programs, cluster, report)?;
    check_blocklist(programs, cluster, report)?;
    check_lost_lock(programs, cluster, report)?;
    check_absent(programs, cluster, report)
}

fn check_killed_osd(
    programs: &Programs,
    cluster: &Cluster,
    report: &mut Report,
) -> Result<(), String> {
    let uri = cluster.uri("failures", "");
    let load = ["perf", &uri, "-w", "randrw", "--verify", "--overwrite", "-q", "16", "-t", "12"];
    // The OSD in memory keeps its objects only if it ends by itself.
    let is_persistent = cluster.is_persistent();
    let load = programs.start(cluster.directory(), "load", &load)?;
    sleep(Duration::from_secs(3));
    if is_persistent {
        cluster.kill_osd()?;
    } else {
        cluster.stop_osd();
    }
    sleep(OSD_DOWN);
    cluster.start_osd()?;
    let (succeeded, text) = load.wait();
    let verified = if succeeded { verification_of(Ok(text)) } else { Err(text.trim().to_owned()) };
    let how = if is_persistent { "killed" } else { "stopped" };
    report.check(&format!("a load continues after the OSD was {how} for {OSD_DOWN:?}"), verified);
    Ok(())
}

/// A cluster is full when its OSD is: here, when it stores more than a small part of its size.
fn check_full(programs: &Programs, cluster: &Cluster, report: &mut Report) -> Result<(), String> {
    let set_ratios = |ratios: [&str; 3]| {
        let names = ["set-nearfull-ratio", "set-backfillfull-ratio", "set-full-ratio"];
        let mut set = names.iter().zip(ratios);
        set.try_for_each(|(name, ratio)| cluster.run("ceph", &["osd", name, ratio]).map(drop))
    };
    // Writes to objects that exist need no space and succeed, so the image has none.
    let uri = cluster.uri("empty", "");
    let write = ["perf", &uri, "-w", "randwrite", "--overwrite", "-q", "4", "-t", "1", "-a", "0"];
    set_ratios(["0.001", "0.002", "0.003"])?;
    let is_full = wait_for(FULL_MAX, || {
        cluster.run("ceph", &["health"]).is_ok_and(|text| text.contains("pool(s) full"))
    });
    if !is_full {
        return Err(format!("ceph health: no full pool within {FULL_MAX:?}"));
    }
    let (_, text) = programs.run_to_end(&write);
    report.check(
        "a full cluster fails writes with Capacity Exceeded",
        expect_text(&text, "Capacity Exceeded"),
    );
    set_ratios(["0.85", "0.9", "0.95"])?;
    let is_written = wait_for(FULL_MAX, || {
        let (succeeded, text) = programs.run_to_end(&write);
        succeeded && !text.contains("Capacity Exceeded")
    });
    let is_written = if is_written { Ok(String::new()) } else { Err("they do not".to_owned()) };
    report.check("writes succeed when it has room again", is_written);
    Ok(())
}

fn check_two_writers(
    programs: &Programs,
    cluster: &Cluster,
    report: &mut Report,
) -> Result<(), String> {
    let uri = cluster.uri("failures", "");
    let server = programs.serve(cluster.directory(), "first", &uri)?;
    let refused =
        programs.run_refused(&["perf", &uri, "-w", "randwrite", "--overwrite", "-t", "1"]);
    let refused =
        refused.and_then(|text| expect_text(&text, "another client keeps the exclusive lock"));
    report.check("a second writer is refused", refused);
    let read = programs.run(&[
        "perf",
        &cluster.uri("failures", "&read-only=yes"),
        "-w",
        "randread",
        "-t",
        "1",
    ]);
    report.check("a reader is not", read.map(|_| String::new()));
    let bench = cluster.run(
        "rbd",
        &[
            "bench",
            "--io-type",
            "write",
            "--io-total",
            "64K",
            "--rbd-default-features",
            "61",
            "failures",
        ],
    );
    let bench = match bench {
        Ok(_) => Err("rbd bench has written".to_owned()),
        Err(_) => Ok(String::new()),
    };
    report.check("rbd bench cannot write either", bench);
    server.kill();
    let write = ["perf", &uri, "-w", "randwrite", "--overwrite", "-q", "4", "-t", "1"];
    let started = std::time::Instant::now();
    let next = programs.run(&write).map(|_| format!("after {} s", started.elapsed().as_secs()));
    report.check("the lock of a client that was killed passes to the next", next);
    let blocked = cluster.run("ceph", &["osd", "blocklist", "ls"]);
    let blocked = blocked.and_then(|text| expect_text(&text, "127.0.0.1:"));
    report.check("and it is blocklisted, so that none of its writes arrives later", blocked);
    Ok(())
}

fn check_blocklist(
    programs: &Programs,
    cluster: &Cluster,
    report: &mut Report,
) -> Result<(), String> {
    for (what, image, with_load) in
        [("under load", "failures", true), ("while it is idle", "other", false)]
    {
        let name = format!("blocklist-{image}");
        let server = programs.serve(cluster.directory(), &name, &cluster.uri(image, ""))?;
        let load = ["perf", &server.uri, "-w", "randrw", "--overwrite", "-q", "8", "-t", "20"];
        let load = with_load.then(|| programs.start(cluster.directory(), "blocked-load", &load));
        let load = load.transpose()?;
        sleep(Duration::from_secs(1));
        let status = cluster.run("rbd", &["status", "--format", "json", image])?;
        let address = status.split("\"address\":\"").nth(1).and_then(|rest| rest.split('"').next());
        let address = address.ok_or_else(|| format!("no watcher in `{status}`"))?;
        cluster.run("ceph", &["osd", "blocklist", "add", address, "60"])?;
        let removed =
            wait_for(LOSS_MAX, || server.text().contains("is removed: this client is blocklisted"));
        let removed =
            if removed { Ok(String::new()) } else { Err(server.text().trim().to_owned()) };
        report.check(
            &format!("a client that is blocklisted {what} loses its device, with the reason"),
            removed,
        );
        if let Some(load) = load {
            let (succeeded, text) = load.wait();
            let failed = if succeeded { Err(text.trim().to_owned()) } else { Ok(String::new()) };
            report.check("its host's load fails", failed);
        }
        drop(server);
        let again = programs.run(&[
            "perf",
            &cluster.uri(image, ""),
            "-w",
            "randwrite",
            "--overwrite",
            "-t",
            "1",
        ]);
        report.check("another client writes", again.map(|_| String::new()));
    }
    Ok(())
}

fn check_lost_lock(
    programs: &Programs,
    cluster: &Cluster,
    report: &mut Report,
) -> Result<(), String> {
    let server = programs.serve(cluster.directory(), "lost-lock", &cluster.uri("other", ""))?;
    let locks = cluster.run("rbd", &["lock", "ls", "--format", "json", "other"])?;
    let value = |key: &str| {
        let found = locks.split(&format!("\"{key}\":\"")).nth(1);
        found.and_then(|rest| rest.split('"').next()).map(str::to_owned)
    };
    let (Some(id), Some(locker)) = (value("id"), value("locker")) else {
        return Err(format!("no lock in `{locks}`"));
    };
    cluster.run("rbd", &["lock", "rm", "other", &id, &locker])?;
    let removed = wait_for(LOSS_MAX, || server.text().contains("is removed: "));
    let removed = if removed { Ok(String::new()) } else { Err(server.text().trim().to_owned()) };
    report.check("a device whose lock is removed by an administrator is removed", removed);
    Ok(())
}

/// What cannot be opened, and why.
fn check_absent(programs: &Programs, cluster: &Cluster, report: &mut Report) -> Result<(), String> {
    let nowhere = cluster.directory().join("nowhere.conf");
    let text = "[global]\nmon_host = [v2:127.0.0.1:1]\nauth_client_required = none\n";
    std::fs::write(&nowhere, text).map_err(|why| format!("{}: {why}", nowhere.display()))?;
    let nowhere = nowhere.display();
    for (what, uri, expected) in [
        (
            "an image that does not exist",
            cluster.uri("absent", ""),
            "the cluster has none of that name",
        ),
        (
            "a pool that does not exist",
            cluster.uri("x", "").replace("rbd:rbd/", "rbd:none/"),
            "open pool none",
        ),
        (
            "a snapshot that does not exist",
            cluster.uri("other@none", ""),
            "the cluster has none of that name",
        ),
        (
            "a configuration file that does not exist",
            "rbd:rbd/x?conf=/nonexistent".to_owned(),
            "configuration of Ceph",
        ),
        (
            "a cluster without a monitor",
            format!("rbd:rbd/x?conf={nowhere}&connect-timeout=2s"),
            "no quorum",
        ),
        ("an unknown option of Ceph", cluster.uri("other", "&conf-unheard-of=1"), "unheard_of"),
    ] {
        let refused = programs.run_refused(&["identify", &uri]);
        report.check(
            &format!("{what} is an error by name"),
            refused.and_then(|text| expect_text(&text, expected)),
        );
    }
    Ok(())
}
