//! Rates beside engines of fio, in turn: its null engine, which does nothing, and io_uring on the same file.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use super::{Workplace, make_directory};
use crate::package::output_of;

/// A measured engine.
struct Engine {
    name: &'static str,
    arguments: Vec<String>,
}

const ROUNDS: usize = 7;
/// Jobs as they are by default, and with calls for batches of I/Os.
const BATCHES: [(&str, &[&str]); 2] = [
    ("one I/O a call", &[]),
    (
        "batches of 32",
        &[
            "--iodepth_batch_submit=32",
            "--iodepth_batch_complete_min=1",
            "--iodepth_batch_complete_max=128",
        ],
    ),
];
/// One thread on the first processor.
const LOAD: &[&str] = &[
    "--thread",
    "--rw=randread",
    "--bs=4k",
    "--iodepth=128",
    "--time_based",
    "--ramp_time=1",
    "--runtime=2",
    "--norandommap",
    "--cpus_allowed=0",
    "--output-format=json",
];

/// Measures and prints all rates.
pub(super) fn measure_rates(place: &Workplace) -> Result<(), String> {
    let files = place.room.join("files");
    make_directory(&files)?;
    let file = files.join("rates");
    let external = format!("--ioengine=external:{}", place.engine().display());
    let own = |uri: &str| vec![external.clone(), format!("--uri={uri}")];
    let foreign = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let file_name = format!("--filename={}", file.display());
    for (batches, arguments) in BATCHES {
        measure(
            place,
            &format!("no data, {batches}"),
            arguments,
            &[
                Engine { name: "null of fio", arguments: foreign("--ioengine=null --size=1g") },
                Engine { name: "tenmil, null:", arguments: own("null:?size=1g") },
                Engine { name: "tenmil, emu:null", arguments: own("emu:null?size=1g") },
                Engine {
                    name: "tenmil, emu:null, bypass",
                    arguments: [own("emu:null?size=1g"), foreign("--bypass=1")].concat(),
                },
            ],
        )?;
    }
    write_file(place, &file)?;
    let device = format!("file:{}", file.display());
    for (batches, arguments) in BATCHES {
        let io_uring = format!("--ioengine=io_uring --direct=1 {file_name}");
        measure(
            place,
            &format!("file, {batches}"),
            arguments,
            &[
                Engine { name: "io_uring of fio", arguments: foreign(&io_uring) },
                Engine { name: "tenmil, file:", arguments: own(&device) },
                Engine {
                    name: "tenmil, file:, sleep",
                    arguments: [own(&device), foreign("--sleep=1")].concat(),
                },
            ],
        )?;
    }
    fs::remove_file(&file).map_err(|why| format!("remove {}: {why}", file.display()))
}

/// Writes every block of the file.
fn write_file(place: &Workplace, file: &Path) -> Result<(), String> {
    let mut fio = Command::new(&place.fio);
    fio.args(["--name=fill", "--rw=write", "--bs=1m", "--size=1g", "--end_fsync=1"]);
    output_of("fill a file", fio.arg(format!("--filename={}", file.display()))).map(drop)
}

/// Measures engines in turn, and prints medians, and medians of the ratios to the first one.
fn measure(
    place: &Workplace,
    what: &str,
    arguments: &[&str],
    engines: &[Engine],
) -> Result<(), String> {
    let mut rates = vec![Vec::new(); engines.len()];
    for _ in 0..ROUNDS {
        for (engine, rates) in engines.iter().zip(&mut rates) {
            let mut fio = Command::new(&place.fio);
            fio.arg("--name=rate").args(&engine.arguments).args(LOAD).args(arguments);
            rates.push(rate_of(&run_placed(engine.name, &mut fio)?)?);
        }
    }
    println!("{what}: thousands of I/Os per second, medians of {ROUNDS}");
    for (engine, own) in engines.iter().zip(&rates) {
        let ratios = own.iter().zip(&rates[0]).map(|(own, first)| own / first).collect();
        let (low, high) = own
            .iter()
            .fold((f64::MAX, 0.0_f64), |(low, high), rate| (low.min(*rate), high.max(*rate)));
        println!(
            "    {:24} {:8.0} ({:.0} to {:.0})   {:.2} of {}",
            engine.name,
            median(own.clone()) / 1e3,
            low / 1e3,
            high / 1e3,
            median(ratios),
            engines[0].name
        );
    }
    Ok(())
}

/// Runs fio with the threads of emulated SSDs on the second processor, and returns its output.
fn run_placed(what: &str, fio: &mut Command) -> Result<String, String> {
    let child = fio.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.map_err(|why| format!("{what}: run fio: {why}"))?;
    // The job warms up for longer.
    std::thread::sleep(Duration::from_millis(500));
    let tasks = fs::read_dir(format!("/proc/{}/task", child.id()));
    for task in tasks.into_iter().flatten().flatten() {
        let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        if name.starts_with("device-") {
            let mut taskset = Command::new("taskset");
            taskset.args(["--pid", "--cpu-list", "1"]).arg(task.file_name());
            output_of("place a device thread", &mut taskset)?;
        }
    }
    let output = child.wait_with_output().map_err(|why| format!("{what}: wait for fio: {why}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("{what}: fio {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

/// I/Os per second of the only job.
fn rate_of(json: &str) -> Result<f64, String> {
    let start = json.find('{').unwrap_or(0);
    let value: Value = serde_json::from_str(&json[start..])
        .map_err(|why| format!("read the output of fio: {why}"))?;
    value["jobs"][0]["read"]["iops"].as_f64().ok_or_else(|| "fio has printed no rate".to_owned())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
