//! Data, snapshots, clones, resizes and many images. What tenmil writes is read by `rbd export`, and the other way
//! round.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::cluster::Cluster;
use super::programs::Programs;
use crate::operate::Report;

/// Bytes of the image that data are written to.
const IMAGE_BYTES: u64 = 64 << 20;
/// Time for a change to be noticed.
const NOTICED_MAX: Duration = Duration::from_secs(15);

/// Checks data, by each path to an image.
pub(super) fn check_data(
    programs: &Programs,
    cluster: &Cluster,
    report: &mut Report,
) -> Result<(), String> {
    let directory = cluster.directory();
    let uri = cluster.uri("data", "");
    let size = IMAGE_BYTES.to_string();
    let created = programs.run(&["volume", "create", &uri, "--size", &size]);
    report.check("an image is created", created.map(|_| String::new()));
    let verify = ["-w", "randrw", "--verify", "--overwrite", "-q", "32", "-t", "4"];
    let verified = programs.run(&[&["perf", &uri][..], &verify].concat());
    report.check("perf verifies what it reads", verification_of(verified));
    let mixed = [
        "-w",
        "randrw",
        "--verify",
        "--overwrite",
        "-q",
        "16",
        "-t",
        "3",
        "--bssplit",
        "512:10,4k:60,128k:30",
    ];
    let verified = programs.run(&[&["perf", &uri][..], &mixed].concat());
    report.check("and of 512 bytes to 128 KiB", verification_of(verified));
    let pattern = directory.join("pattern");
    write_pattern(&pattern)?;
    let from = pattern.display().to_string();
    let copied = programs.run(&["copy", &from, &uri, "--overwrite", "--verify"]);
    report.check("a file is copied to the image", copied.map(|_| String::new()));
    report.check("rbd export reads the same bytes", compare_export(cluster, "data", &pattern));
    check_snapshots(programs, cluster, &pattern, report);
    check_over_tcp(programs, cluster, report)
}

fn check_snapshots(programs: &Programs, cluster: &Cluster, pattern: &Path, report: &mut Report) {
    let uri = cluster.uri("data", "");
    let snapshot = cluster.uri("data@before", "");
    let volume = |arguments: &[&str]| {
        programs.run(&[&["volume"][..], arguments].concat()).map(|_| String::new())
    };
    report.check("a snapshot is created", volume(&["snapshot", &uri, "before"]));
    let written =
        programs.run(&["perf", &uri, "-w", "randwrite", "--overwrite", "-q", "32", "-t", "2"]);
    report.check("the image is written", written.map(|_| String::new()));
    let changed = match compare_export(cluster, "data", pattern) {
        Ok(_) => Err("the image is still that of the snapshot, expected another".to_owned()),
        Err(_) => Ok(String::new()),
    };
    report.check("the image differs from the snapshot", changed);
    let copy = cluster.directory().join("copy");
    let _ = std::fs::remove_file(&copy);
    let target = format!("file:{}", copy.display());
    let copied = programs.run(&["copy", &snapshot, &target]);
    report.check("the snapshot is copied to a file", copied.map(|_| String::new()));
    report.check("it has the bytes of the snapshot", compare_files(&copy, pattern));
    let refused =
        programs.run_refused(&["perf", &snapshot, "-w", "randwrite", "--overwrite", "-t", "1"]);
    report.check("the snapshot cannot be written", refused.map(|_| String::new()));
    report.check("a clone is created", volume(&["clone", &snapshot, "clone"]));
    report.check("the clone reads as the snapshot", compare_export(cluster, "clone", pattern));
    report.check("the clone is detached", volume(&["decouple", &cluster.uri("clone", "")]));
    report.check("it reads as before", compare_export(cluster, "clone", pattern));
    report.check("the image is rolled back", volume(&["rollback", &uri, "before"]));
    report.check("it reads as the snapshot", compare_export(cluster, "data", pattern));
    let listed = cluster.run("rbd", &["snap", "ls", "--format", "json", "data"]);
    let has_snapshot = listed.and_then(|text| expect_text(&text, "\"before\""));
    report.check("rbd lists the snapshot", has_snapshot);
    let deleted = programs.run_refused(&["volume", "delete", &uri]);
    let deleted = deleted.and_then(|text| expect_text(&text, "the image has snapshots"));
    report.check("an image with snapshots is not deleted", deleted);
    report.check("the snapshot is deleted", volume(&["delete", &snapshot]));
    report.check("the clone is deleted", volume(&["delete", &cluster.uri("clone", "")]));
    let list =
        programs.run(&["volume", "list", &format!("rbd:rbd?conf={}", cluster.conf().display())]);
    let list = list.and_then(|text| match text.contains("data") && !text.contains("clone") {
        true => Ok(String::new()),
        false => Err(format!("the list is `{text}`, expected the image `data` alone")),
    });
    report.check("one image is left", list);
}

/// An image over NVMe/TCP, which grows and shrinks meanwhile.
fn check_over_tcp(
    programs: &Programs,
    cluster: &Cluster,
    report: &mut Report,
) -> Result<(), String> {
    let server = programs.serve(cluster.directory(), "serve", &cluster.uri("data", ""))?;
    let identified = programs.run(&["identify", &server.uri]);
    let durable = identified
        .and_then(|text| expect_text(&text, "Volatile Write Cache (feature 06h): Invalid Field"));
    report.check("a host sees no volatile write cache", durable);
    let verify = ["-w", "randrw", "--verify", "--overwrite", "-q", "16", "-P", "2", "-t", "4"];
    let verified = programs.run(&[&["perf", &server.uri][..], &verify].concat());
    report.check("perf verifies over NVMe/TCP with two queues", verification_of(verified));
    for (what, mebibytes) in [("grows", "96"), ("shrinks", "64")] {
        let resized =
            cluster.run("rbd", &["resize", "--allow-shrink", "--size", mebibytes, "data"]);
        report.check(
            &format!("rbd resize: the image {what} while it is served"),
            resized.map(|_| String::new()),
        );
        if what == "shrinks" {
            // The namespace keeps its size, and the device rejects what is past the end.
            break;
        }
        // The capacity in bytes.
        let wanted = "100663296 (0x6000000)";
        let seen = super::programs::wait_for(NOTICED_MAX, || {
            programs.run(&["identify", &server.uri]).is_ok_and(|text| text.contains(wanted))
        });
        let seen = if seen {
            Ok(String::new())
        } else {
            Err(format!("no {wanted} within {NOTICED_MAX:?}"))
        };
        report.check("a host sees the new size", seen);
    }
    drop(server);
    let watchers = cluster.run("rbd", &["status", "data"]);
    let closed = watchers.and_then(|text| expect_text(&text, "Watchers: none"));
    report.check("the image is closed", closed);
    Ok(())
}

/// Opens many images in one process.
pub(super) fn check_many(
    programs: &Programs,
    cluster: &Cluster,
    count: u32,
    report: &mut Report,
) -> Result<(), String> {
    let directory = cluster.directory();
    let mut devices = Vec::new();
    println!("  note  creating {count} images");
    for index in 0..count {
        let name = format!("many-{index}");
        cluster.run("rbd", &["create", "--size", "16M", &name])?;
        devices.push(cluster.uri(&name, ""));
    }
    let mut few: Option<(u64, u64)> = None;
    for open in [count / 10, count] {
        let config = directory.join("many.toml");
        write_config(&config, &devices[..open as usize])?;
        let name = format!("many-{open}");
        let arguments = ["serve", "--config", &config.display().to_string()];
        let process = programs.start(directory, &name, &arguments)?;
        let is_ready = super::programs::wait_for(Duration::from_secs(600), || {
            process.text().contains("ready")
        });
        if !is_ready {
            return Err(format!("serve of {open} images: `{}`", process.text().trim()));
        }
        let (kilobytes, threads) =
            (status_of(process.pid(), "VmRSS:")?, status_of(process.pid(), "Threads:")?);
        println!("  note  {open} images: {} MiB, {threads} threads", kilobytes >> 10);
        let Some((kilobytes_before, threads_before)) = few.replace((kilobytes, threads)) else {
            continue;
        };
        let more = u64::from(count - count / 10);
        let each = kilobytes.saturating_sub(kilobytes_before) / more;
        let cost = if each <= 1024 {
            Ok(format!("{each} KiB"))
        } else {
            Err(format!("{each} KiB, expected at most 1024"))
        };
        report.check("an image costs at most 1 MiB", cost);
        let threads = match threads.saturating_sub(threads_before) {
            0..=4 => {
                Ok(format!("{threads} with {open} images, {threads_before} with {}", count / 10))
            }
            more => Err(format!("{more} more threads")),
        };
        report.check("an image costs no thread", threads);
    }
    Ok(())
}

/// A target with a namespace for each device.
fn write_config(path: &Path, devices: &[String]) -> Result<(), String> {
    let mut text = String::from(
        "[[listener]]\naddress = \"127.0.0.1:0\"\n\n[[subsystem]]\nnqn = \"nqn.2026-01.org.tenmil:many\"\n",
    );
    for (index, device) in devices.iter().enumerate() {
        text += &format!("\n[[subsystem.namespace]]\nnsid = {}\nuri = \"{device}\"\n", index + 1);
    }
    std::fs::write(path, text).map_err(|why| format!("{}: {why}", path.display()))
}

/// A number of `/proc/PID/status`.
fn status_of(pid: u32, key: &str) -> Result<u64, String> {
    let path = format!("/proc/{pid}/status");
    let text = std::fs::read_to_string(&path).map_err(|why| format!("{path}: {why}"))?;
    let value = text.lines().find_map(|line| line.strip_prefix(key));
    let value = value.and_then(|value| value.split_whitespace().next()?.parse().ok());
    value.ok_or_else(|| format!("{path}: no {key}"))
}

/// The line of a report about verified blocks.
pub(super) fn verification_of(report: Result<String, String>) -> Result<String, String> {
    let report = report?;
    let line = report.lines().find_map(|line| line.strip_prefix("verification: "));
    let line = line.ok_or("no line about verification in the report")?;
    let is_good = line.contains(" blocks good") && !line.starts_with("0 blocks");
    if is_good { Ok(line.to_owned()) } else { Err(line.to_owned()) }
}

pub(super) fn expect_text(text: &str, wanted: &str) -> Result<String, String> {
    if text.contains(wanted) {
        return Ok(String::new());
    }
    let text: String = text.trim().chars().take(400).collect();
    Err(format!("no `{wanted}` in `{text}`"))
}

/// Bytes that are nowhere the same, with a hole of some MiB.
fn write_pattern(path: &Path) -> Result<(), String> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(usize::try_from(IMAGE_BYTES).unwrap_or(0));
    while (bytes.len() as u64) < IMAGE_BYTES {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes[20 << 20..32 << 20].fill(0);
    std::fs::write(path, bytes).map_err(|why| format!("{}: {why}", path.display()))
}

/// Whether `rbd export` of an image gives the bytes of a file.
fn compare_export(cluster: &Cluster, image: &str, file: &Path) -> Result<String, String> {
    let path = cluster.directory().join("export");
    let target = File::create(&path).map_err(|why| format!("{}: {why}", path.display()))?;
    let mut export = Command::new("rbd");
    export.arg("-c").arg(cluster.conf()).args(["export", "--no-progress", image, "-"]);
    let ended = export.stdout(target).stderr(Stdio::null()).status();
    if !ended.is_ok_and(|status| status.success()) {
        return Err(format!("rbd export {image} failed"));
    }
    compare_files(&path, file)
}

fn compare_files(one: &Path, other: &Path) -> Result<String, String> {
    let mut read = [Vec::new(), Vec::new()];
    for (bytes, path) in read.iter_mut().zip([one, other]) {
        let file = File::open(path).and_then(|mut file| file.read_to_end(bytes));
        file.map_err(|why| format!("{}: {why}", path.display()))?;
    }
    let [one, other] = read;
    if one.len() != other.len() {
        return Err(format!("{} bytes, expected {}", one.len(), other.len()));
    }
    match one.iter().zip(&other).position(|(one, other)| one != other) {
        None => Ok(format!("{} bytes", one.len())),
        Some(index) => Err(format!("byte {index} differs")),
    }
}
