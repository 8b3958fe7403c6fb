//! Jobs of fio that verify what they wrote, and jobs that must fail.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::{Workplace, make_directory};

/// Queue depths of the jobs that verify.
const DEPTHS: [&str; 3] = ["1", "32", "128"];

/// A job and what it must do.
struct Job {
    what: String,
    uri: String,
    arguments: Vec<String>,
    /// Text of the error with which it fails.
    error: Option<&'static str>,
}

/// A server of a RAM disk, which ends when this is dropped.
struct DiskServer {
    child: Child,
    uri: String,
}

/// Runs all jobs. Returns what is wrong.
pub(super) fn check_engine(place: &Workplace, tenmil: &Path) -> Result<Vec<String>, String> {
    let files = place.room.join("files");
    make_directory(&files)?;
    let server = DiskServer::start(&program(place, tenmil)?)?;
    let mut problems: Vec<String> = check_help(place).err().into_iter().collect();
    let jobs = verifying_jobs(&files, &server).into_iter().chain(other_jobs(&files));
    for job in jobs.chain(refused_jobs()) {
        let result = job.run(place);
        println!("fio-engine: {}: {}", job.what, if result.is_ok() { "ok" } else { "FAILED" });
        problems.extend(result.err().map(|why| format!("{}: {why}", job.what)));
    }
    Ok(problems)
}

/// The program that serves, built if it is missing.
fn program(place: &Workplace, tenmil: &Path) -> Result<PathBuf, String> {
    if !tenmil.exists() && tenmil == Path::new("target/release/tenmil") {
        let mut cargo = Command::new("cargo");
        cargo.args(["build", "--release", "--bin", "tenmil"]).current_dir(&place.root);
        crate::package::run_command("build tenmil", &mut cargo)?;
    }
    tenmil.canonicalize().map_err(|why| format!("no program at {}: {why}", tenmil.display()))
}

/// fio lists the options of the engine.
fn check_help(place: &Workplace) -> Result<(), String> {
    let mut fio = Command::new(&place.fio);
    fio.arg(format!("--enghelp={}", place.engine().display()));
    let help = crate::package::output_of("fio --enghelp", &mut fio)?;
    for option in ["uri", "bypass", "sleep"] {
        if !help.lines().any(|line| line.split_whitespace().next() == Some(option)) {
            return Err(format!("fio --enghelp: {help:?}, expected the option {option}"));
        }
    }
    Ok(())
}

fn verifying_jobs(files: &Path, server: &DiskServer) -> Vec<Job> {
    let file = format!("file:{}?size=64m", files.join("verified").display());
    let mut jobs = Vec::new();
    for uri in ["emu:ram", &file, &server.uri] {
        for depth in DEPTHS {
            for sleep in ["0", "1"] {
                let what = format!("verify {uri} at depth {depth}, sleep={sleep}");
                let (depth, sleep) = (format!("--iodepth={depth}"), format!("--sleep={sleep}"));
                jobs.push(Job::new(&what, uri, &[VERIFY, &[&depth, &sleep]].concat()));
            }
        }
    }
    jobs
}

/// Random writes of various sizes, verified.
const VERIFY: &[&str] = &["--rw=randrw", "--bsrange=4k-64k", "--size=16m", "--verify=crc32c"];

fn other_jobs(files: &Path) -> Vec<Job> {
    // The jobs that verify have made it.
    let shared = format!("file:{}", files.join("verified").display());
    let named = |arguments: &[&'static str]| [VERIFY, arguments].concat();
    vec![
        Job::new("without the block layer", "emu:ram", &named(&["--bypass=1", "--iodepth=32"])),
        Job::new("depth above that of the device", "emu:ram", &named(&["--iodepth=700"])),
        Job::new("batches", "emu:ram", &named(&["--iodepth=64", "--iodepth_batch_submit=16"])),
        Job::new(
            "buffers larger than those of the library",
            "ram:256m",
            &["--rw=randrw", "--bs=1m", "--size=128m", "--iodepth=128", "--verify=md5"],
        ),
        Job::new("trim", "ram:64m", &["--rw=randtrim", "--bs=4k", "--size=8m", "--iodepth=8"]),
        Job::new(
            "flushes",
            "ram:64m",
            &["--rw=randwrite", "--fsync=4", "--bs=4k", "--size=8m", "--iodepth=8"],
        ),
        Job::new(
            "threads that share a device",
            "ram:64m",
            &named(&["--thread", "--numjobs=4", "--offset_increment=16m", "--iodepth=8"]),
        ),
        Job::new(
            "processes that read a file asleep",
            &shared,
            &["--rw=randread", "--bs=4k", "--size=32m", "--numjobs=3", "--iodepth=32", "--sleep=1"],
        ),
    ]
}

fn refused_jobs() -> Vec<Job> {
    let one = ["--rw=read", "--bs=4k", "--size=1m"];
    vec![
        Job::refused(
            "corrupted reads",
            "fault:[ram:64m]?rule=corrupt:read/100",
            &[VERIFY, &["--iodepth=8"]].concat(),
            "verify",
        ),
        Job::refused(
            "injected error",
            "fault:[ram:64m?block=4096]?rule=error:read@5-5",
            &one,
            "tenmil: Unrecovered Read Error",
        ),
        Job::refused("unknown device", "tape:0", &one, "no devices of kind `tape`"),
        Job::refused("no device", "", &one, "expected the option `uri`"),
        Job::refused(
            "size that is no multiple of the block size",
            "ram:64m",
            &["--rw=randwrite", "--bs=1000", "--size=1m"],
            "Invalid argument",
        ),
    ]
}

impl Job {
    fn new(what: &str, uri: &str, arguments: &[&str]) -> Self {
        let arguments = arguments.iter().map(|one| (*one).to_owned()).collect();
        Self { what: what.to_owned(), uri: uri.to_owned(), arguments, error: None }
    }

    fn refused(what: &str, uri: &str, arguments: &[&str], error: &'static str) -> Self {
        Self { error: Some(error), ..Self::new(what, uri, arguments) }
    }

    fn run(&self, place: &Workplace) -> Result<(), String> {
        let arguments: Vec<&str> = self.arguments.iter().map(String::as_str).collect();
        let mut fio = Command::new("timeout");
        let job = place.job(&self.uri, &arguments);
        fio.arg("120").arg(job.get_program()).args(job.get_args());
        // fio writes files with the state of verifications where it runs.
        fio.current_dir(place.room.join("files"));
        let output = fio.output().map_err(|why| format!("run fio: {why}"))?;
        let text =
            String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        let last = || text.lines().rev().take(8).collect::<Vec<_>>().join(" | ");
        match self.error {
            None if output.status.success() => Ok(()),
            None => Err(format!("fio: {}: {}", output.status, last())),
            Some(_) if output.status.success() => {
                Err("fio succeeded, expected an error".to_owned())
            }
            Some(error) if text.contains(error) => Ok(()),
            Some(error) => Err(format!("fio: {}, expected `{error}`", last())),
        }
    }
}

impl DiskServer {
    fn start(tenmil: &Path) -> Result<Self, String> {
        let mut command = Command::new(tenmil);
        command.args(["serve", "ram:64m", "--listen", "tcp://127.0.0.1:0"]);
        command.stdout(Stdio::piped()).stderr(Stdio::null()).stdin(Stdio::null());
        let child = command.spawn().map_err(|why| format!("start tenmil serve: {why}"))?;
        let mut server = Self { child, uri: String::new() };
        let lines = server.child.stdout.take().map(BufReader::new).into_iter();
        for line in lines.flat_map(BufRead::lines).map_while(Result::ok) {
            let address = line.split_whitespace().find_map(|word| word.strip_prefix("tcp://"));
            if let Some(address) = address.and_then(|address| address.split('/').next()) {
                server.uri = format!("tcp://{address}/nqn.2026-01.org.tenmil:disk?ns=1");
            }
            if line.contains("ready") {
                break;
            }
        }
        match server.uri.is_empty() {
            true => Err("tenmil serve: it ended, expected its address".to_owned()),
            false => Ok(server),
        }
    }
}

impl Drop for DiskServer {
    fn drop(&mut self) {
        // It serves memory: nothing is lost.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
