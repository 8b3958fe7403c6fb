//! What a server counts: by `get io_statistics` and `iostat`, against clients that count themselves.

use std::process::Command;
use std::time::Duration;

use crate::served::{ServeProcess, are_tools_installed, run};
use serde_json::Value;

const TENMIL: &str = env!("CARGO_BIN_EXE_tenmil");
const HOST: &str = "nqn.2014-08.org.example:one";

fn statistics(served: &ServeProcess, line: &str) -> Vec<Value> {
    let line = format!("get io_statistics {line} --json").replace("  ", " ");
    let text = served.stdout_of_rpc_command(&line);
    serde_json::from_str(&text).unwrap()
}

#[test]
fn commands_of_fio_are_counted_as_by_fio() {
    if !are_tools_installed(&["fio"]) {
        return;
    }
    let served = ServeProcess::start("ram:64m", &[]);
    let uri = format!("--uri={}", served.uri());
    let before = statistics(&served, "").remove(0);
    let report = run(
        "fio",
        &[
            "--name=mixed",
            "--ioengine=nbd",
            &uri,
            "--rw=randrw",
            "--bsrange=4k-64k",
            "--size=32m",
            "--iodepth=8",
            "--output-format=json",
        ],
    );
    let report = &report[report.find('{').unwrap()..];
    let report: Value = serde_json::from_str(report).unwrap();
    let job = &report["jobs"][0];
    let after = statistics(&served, "").remove(0);
    assert_eq!((&after["protocol"], &after["namespace"]), (&"nbd".into(), &Value::Null));
    let change = |name: &str| after[name].as_u64().unwrap() - before[name].as_u64().unwrap();
    for (ours, direction, theirs) in [
        ("reads", "read", "total_ios"),
        ("read_bytes", "read", "io_bytes"),
        ("writes", "write", "total_ios"),
        ("written_bytes", "write", "io_bytes"),
    ] {
        let theirs = job[direction][theirs].as_u64().unwrap();
        assert!(theirs > 0);
        assert_eq!(change(ours), theirs, "{ours}");
    }
    // Latencies at the server are below those at the client.
    let p99 = |name: &str| after[name].as_u64().unwrap();
    assert!(p99("read_p50_ns") <= p99("read_p99_ns") && p99("read_p99_ns") <= p99("read_p999_ns"));
    let most = job["read"]["clat_ns"]["max"].as_u64().unwrap();
    assert!(p99("read_p50_ns") <= most, "{} {most}", p99("read_p50_ns"));
}

#[test]
fn hosts_namespaces_and_queues_have_rows_of_their_own() {
    let served = ServeProcess::start_shell_line(&format!(
        "{TENMIL} serve null: ram:16m --listen tcp://127.0.0.1:0"
    ));
    let address = served.ready.split_whitespace().nth(1).unwrap().replace("tcp://", "");
    let uri = |nsid: u32, host: &str| {
        format!("tcp://{address}/nqn.2026-01.org.tenmil:disk/{nsid}?hostnqn={host}")
    };
    let load = |uri: &str| {
        let output = Command::new("timeout")
            .args(["60", TENMIL, "perf", uri, "-w", "randread", "-t", "0.5", "--json"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    load(&uri(1, HOST));
    load(&uri(2, "nqn.2014-08.org.example:two"));
    let rows = statistics(&served, "");
    let names: Vec<_> = rows.iter().map(|row| row["namespace"].as_u64().unwrap()).collect();
    assert_eq!(names, [1, 2]);
    assert!(rows.iter().all(|row| row["reads"].as_u64().unwrap() > 100 && row["host"].is_null()));
    let of_host = statistics(&served, &format!("by=host host={HOST}"));
    assert_eq!(of_host.len(), 1);
    assert_eq!((&of_host[0]["host"], &of_host[0]["reads"]), (&HOST.into(), &rows[0]["reads"]));
    let whole = statistics(&served, "by=export");
    let sum: u64 = rows.iter().map(|row| row["reads"].as_u64().unwrap()).sum();
    assert_eq!(whole[0]["reads"], sum);
    // The queues of both are closed.
    let queues = statistics(&served, "by=queue");
    assert!(queues.len() == 2 && queues.iter().all(|row| row["queue"].is_null()), "{queues:?}");
    assert!(statistics(&served, "export=nqn.2026-01.org.example:none").is_empty());
}

#[test]
fn iostat_prints_the_rates_of_a_load() {
    let served = ServeProcess::start_shell_line(&format!(
        "{TENMIL} serve 'delay:[null:]?read=1ms' --listen tcp://127.0.0.1:0"
    ));
    let address = served.ready.split_whitespace().nth(1).unwrap().replace("tcp://", "");
    let uri = format!("tcp://{address}/nqn.2026-01.org.tenmil:disk/1");
    let mut load = Command::new("timeout")
        .args(["60", TENMIL, "perf", &uri, "-w", "randread", "-t", "20", "--json"])
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    // A row is there, and has rates, once the load has begun.
    let mut rates = None;
    for _ in 0..50 {
        let text = served.stdout_of_rpc_command("iostat -i 200ms --count 1 --json");
        let report: Value = serde_json::from_str(&text).unwrap();
        let row = report["rows"][0].clone();
        if row["reads_per_s"].as_f64().is_some_and(|reads| reads > 0.0) {
            rates = Some(row);
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    let row = rates.unwrap();
    let of = |name: &str| row[name].as_f64().unwrap();
    assert!((of("read_kib_per_s") / of("reads_per_s") - 4.0).abs() < 1e-6, "{row}");
    assert!(of("read_await_ms") >= 1.0, "{row}");
    assert!(of("queue_size") > 0.0 && of("util_percent") > 0.0, "{row}");
    assert!(of("writes_per_s").abs() < 1e-9 && of("errors_per_s").abs() < 1e-9, "{row}");
    let table = served.stdout_of_rpc_command("iostat -i 200ms --count 2 --by host");
    let titles = table.lines().filter(|line| line.starts_with("export ")).count();
    assert_eq!(titles, 2, "{table}");
    assert!(
        table.contains("r_await") && table.contains("nqn.2026-01.org.tenmil:disk nqn."),
        "{table}"
    );
    load.kill().unwrap();
    load.wait().unwrap();
}

#[test]
fn server_without_a_configuration_file_ignores_sighup() {
    for uri in ["nbd", "tcp"] {
        let served = match uri {
            "nbd" => ServeProcess::start("ram:1m", &[]),
            _ => ServeProcess::start_shell_line(&format!(
                "{TENMIL} serve ram:1m --listen tcp://127.0.0.1:0"
            )),
        };
        let hang_up = format!("kill -HUP {}", served.pid());
        assert!(Command::new("sh").args(["-c", &hang_up]).status().unwrap().success());
        std::thread::sleep(Duration::from_millis(300));
        served.stdout_of_rpc_command("get process --json");
        assert_eq!(served.stop_with_sigterm(), Some(0));
    }
}

#[test]
fn limits_of_hosts_hold_and_change_and_waiting_is_counted() {
    let served = ServeProcess::start_shell_line(&format!(
        "{TENMIL} serve null: --listen tcp://127.0.0.1:0 --limit-iops 700"
    ));
    let address = served.ready.split_whitespace().nth(1).unwrap().replace("tcp://", "");
    let uri = format!("tcp://{address}/nqn.2026-01.org.tenmil:disk/1?hostnqn={HOST}");
    let reads = || {
        let rows = statistics(&served, "by=host");
        rows.first().map_or(0, |row| row["reads"].as_u64().unwrap())
    };
    let run_load = |rate: f64| {
        let (before, start) = (reads(), std::time::Instant::now());
        let output = Command::new("timeout")
            .args(["60", TENMIL, "perf", &uri, "-w", "randread", "-P", "3", "-t", "1", "--json"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        let elapsed = start.elapsed().as_secs_f64();
        let (count, most) = (reads() - before, rate * (elapsed + 0.1));
        #[expect(clippy::cast_precision_loss, reason = "a small number")]
        let count = count as f64;
        assert!(count > rate * 0.5 && count < most, "{count} reads, expected up to {most}");
    };
    run_load(700.0);
    let limits = || -> Value {
        serde_json::from_str(&served.stdout_of_rpc_command("get limits --json")).unwrap()
    };
    let row = |of: &str| limits().as_array().unwrap().iter().find(|row| row["of"] == of).cloned();
    assert_eq!(row("namespace").unwrap()["iops"], 700);
    served.stdout_of_rpc_command("set host_limits read_bytes=1228800");
    assert_eq!(row("each-host").unwrap()["read_bytes"], 1_228_800);
    run_load(300.0);
    served.stdout_of_rpc_command(&format!("set host_limits host={HOST} read_bytes=0 iops=500"));
    run_load(500.0);
    let of_host = &statistics(&served, "by=host")[0];
    let of = |name: &str| of_host[name].as_u64().unwrap();
    assert!(of("limited") > 500 && of("limit_wait_ns") > 1_000_000_000, "{of_host}");
}
