//! Export of metrics and traces to an OpenTelemetry collector: what a collector receives, and that one
//! that does not respond delays no I/O.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::Value;

const NQN: &str = "nqn.2026-01.org.tenmil:disk";
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// A server over a delayed device that exports to `endpoint`. Dropping it ends it.
struct Served {
    child: Child,
    root: tempfile::TempDir,
    port: u16,
}

impl Served {
    fn start(endpoint: &str) -> Self {
        let root = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
        command.args(["serve", "delay:[ram:8m]?read=20ms", "-l", "tcp://127.0.0.1:0", "--json"]);
        command.args(["--slow-io", "10ms", "--instance", "exporting", "--control", "control"]);
        command.args(["--otlp-endpoint", endpoint]);
        command.env("XDG_RUNTIME_DIR", root.path()).current_dir(root.path());
        command.env("OTEL_METRIC_EXPORT_INTERVAL", "300").env("OTEL_BSP_SCHEDULE_DELAY", "200");
        let log = fs::File::create(root.path().join("log")).unwrap();
        let mut child = command.stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let mut ready = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut ready).unwrap();
        let ready: Value = serde_json::from_str(&ready).unwrap();
        let listen = ready["listen"][0].as_str().unwrap();
        let port = listen.rsplit(':').next().unwrap().parse().unwrap();
        Self { child, root, port }
    }

    fn run(&self, words: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
        command.args(words).env("XDG_RUNTIME_DIR", self.root.path());
        command.current_dir(self.root.path()).output().unwrap()
    }

    fn load(&self) {
        let uri = format!("tcp://127.0.0.1:{}/{NQN}/1", self.port);
        let output = self.run(&["perf", &uri, "-t", "0.3", "-a", "0.1", "-q", "1"]);
        assert!(output.status.success(), "{output:?}");
    }

    /// Value of a series of `/metrics`.
    fn metric(&self, series: &str) -> f64 {
        let mut stream = UnixStream::connect(self.root.path().join("control")).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let value = text.lines().find_map(|line| line.strip_prefix(series)).unwrap_or_default();
        value.trim().parse().unwrap_or_else(|_| panic!("no {series} in {text}"))
    }

    fn log(&self) -> String {
        fs::read_to_string(self.root.path().join("log")).unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Receives one request: its path and its body.
fn receive_request(stream: TcpStream) -> std::io::Result<(String, Value)> {
    let mut reader = BufReader::new(stream);
    let (mut line, mut path, mut len) = (String::new(), String::new(), 0);
    while reader.read_line(&mut line)? > 2 {
        if let Some(rest) = line.strip_prefix("POST ") {
            path = rest.split(' ').next().unwrap().to_owned();
        } else if let Some(rest) = line.strip_prefix("Content-Length: ") {
            len = rest.trim().parse().unwrap();
        }
        line.clear();
    }
    let mut body = vec![0; len];
    reader.read_exact(&mut body)?;
    reader.get_mut().write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")?;
    Ok((path, serde_json::from_slice(&body).unwrap()))
}

/// A collector at a port of its own, and what it receives.
fn start_collector() -> (String, Receiver<(String, Value)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let (sender, received) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let request = stream.and_then(receive_request);
            if request.is_ok_and(|request| sender.send(request).is_err()) {
                return;
            }
        }
    });
    (endpoint, received)
}

/// Objects of an array in an array.
fn flattened<'a>(request: &'a Value, levels: [&str; 3]) -> Vec<&'a Value> {
    let array = |value: &'a Value, name: &str| value[name].as_array();
    let first = array(request, levels[0]).into_iter().flatten();
    let second = first.flat_map(|one| array(one, levels[1]).into_iter().flatten());
    second.flat_map(|one| array(one, levels[2]).into_iter().flatten()).collect()
}

fn text_of(span: &Value, key: &str) -> Option<String> {
    let attributes = span["attributes"].as_array().unwrap();
    let found = attributes.iter().find(|one| one["key"] == key)?;
    Some(found["value"]["stringValue"].as_str()?.to_owned())
}

#[test]
fn collector_receives_metrics_and_spans() {
    if !tenmil_rpc::HAS_OTLP {
        eprintln!("skipped: built without the feature otlp");
        return;
    }
    let (endpoint, received) = start_collector();
    let served = Served::start(&endpoint);
    served.load();
    assert!(served.run(&["set", "slow_io", "threshold=1s"]).status.success());
    let begin = Instant::now();
    let (mut metrics, mut spans) = (Vec::new(), Vec::<Value>::new());
    let has_all = |metrics: &[Value], spans: &[Value]| {
        let has = |wanted: &str| spans.iter().any(|span| span["name"] == wanted);
        let operations = metrics.iter().find(|metric| metric["name"] == "tenmil_io_operations");
        let points = operations.and_then(|metric| metric["sum"]["dataPoints"].as_array());
        let is_counted = points.is_some_and(|points| points.iter().any(|one| one["asInt"] != "0"));
        is_counted && ["slow read", "connection", "set"].into_iter().all(has)
    };
    while !has_all(&metrics, &spans) {
        assert!(begin.elapsed() < TIME_LIMIT, "{spans:#?}\n{}", served.log());
        let Ok((path, request)) = received.recv_timeout(TIME_LIMIT) else { panic!("no request") };
        match path.as_str() {
            "/v1/metrics" => {
                let resource = &request["resourceMetrics"][0]["resource"];
                assert_eq!(text_of(resource, "service.name").as_deref(), Some("tenmil"));
                assert_eq!(text_of(resource, "service.instance.id").as_deref(), Some("exporting"));
                let found = flattened(&request, ["resourceMetrics", "scopeMetrics", "metrics"]);
                metrics = found.into_iter().cloned().collect();
            }
            "/v1/traces" => {
                let found = flattened(&request, ["resourceSpans", "scopeSpans", "spans"]);
                spans.extend(found.into_iter().cloned());
            }
            other => panic!("{other}"),
        }
    }
    let slow = spans.iter().find(|span| span["name"] == "slow read").unwrap();
    assert_eq!(text_of(slow, "tenmil.export").as_deref(), Some(NQN));
    let is_stage =
        |span: &&Value| span["parentSpanId"] == slow["spanId"] && span["name"] == "device";
    let device = spans.iter().find(is_stage).unwrap();
    let ns = |span: &Value, name: &str| span[name].as_str().unwrap().parse::<u64>().unwrap();
    let took = ns(device, "endTimeUnixNano") - ns(device, "startTimeUnixNano");
    assert!((20_000_000..10_000_000_000).contains(&took), "{took} ns");
    assert!(ns(device, "endTimeUnixNano") <= ns(slow, "endTimeUnixNano"));
    let connection = spans.iter().find(|span| span["name"] == "connection").unwrap();
    assert!(text_of(connection, "tenmil.reason").is_some(), "{connection}");
    let latency = metrics.iter().find(|metric| metric["name"] == "tenmil_io_duration_seconds");
    let point = &latency.unwrap()["histogram"]["dataPoints"][0];
    assert_eq!(
        point["bucketCounts"].as_array().unwrap().len(),
        point["explicitBounds"].as_array().unwrap().len() + 1
    );
}

#[test]
fn collector_that_does_not_respond_delays_no_io_and_failures_are_counted() {
    if !tenmil_rpc::HAS_OTLP {
        eprintln!("skipped: built without the feature otlp");
        return;
    }
    // Nothing listens at a port that was just closed; the other end of a second one never answers.
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    for (endpoint, is_closed) in [(closed, true), (silent.local_addr().unwrap(), false)] {
        let served = Served::start(&format!("http://{endpoint}"));
        let begin = Instant::now();
        served.load();
        assert!(served.run(&["get", "slow_io"]).status.success());
        let log = served.log();
        assert!(log.contains("slow I/O: Read"), "{log}");
        assert!(begin.elapsed() < TIME_LIMIT / 2, "{:?}", begin.elapsed());
        while is_closed && !served.log().contains("does not accept it: ") {
            assert!(begin.elapsed() < TIME_LIMIT, "{}", served.log());
            std::thread::sleep(Duration::from_millis(50));
        }
        if is_closed {
            let failed =
                served.metric("tenmil_otlp_requests_total{signal=\"metrics\",result=\"failed\"}");
            assert!(failed >= 1.0, "{failed}");
            let accepted =
                served.metric("tenmil_otlp_requests_total{signal=\"metrics\",result=\"accepted\"}");
            assert!(accepted == 0.0, "{accepted}");
        }
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
    command.args(["serve", "null:", "-l", "tcp://127.0.0.1:0", "--otlp-endpoint", "https://a"]);
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && text.contains("TLS is not supported"), "{text}");
}
