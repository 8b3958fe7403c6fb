//! The real Prometheus: it collects the served process, and answers every expression that is shipped.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::expressions::{Expression, panel_expressions, rule_expressions, without_filters};
use super::service::{Service, free_port};
use super::{Report, curl, run_program};

/// Programs of the package `prometheus`.
#[derive(Debug)]
pub(super) struct Tools {
    prometheus: PathBuf,
    promtool: PathBuf,
}

/// Time in which an expression has to have data.
const DATA_MAX: Duration = Duration::from_secs(40);
const PAUSE: Duration = Duration::from_millis(500);
/// Seconds of load that the queries need.
pub(super) const LOAD_SECONDS: u32 = 60;

/// Expressions that are empty in a healthy process.
const MAY_BE_EMPTY: &[&str] = &["tenmil_io_errors_total"];

/// Finds the programs in PATH, or unpacks the package of the distribution into `directory`.
pub(super) fn find_tools(directory: &Path) -> Result<Tools, String> {
    let unpacked = directory.join("prometheus");
    for bin in [PathBuf::new(), unpacked.join("usr/bin")] {
        let tools = Tools { prometheus: bin.join("prometheus"), promtool: bin.join("promtool") };
        if Command::new(&tools.promtool).arg("--version").output().is_ok() {
            return Ok(tools);
        }
    }
    let packages = directory.join("packages");
    std::fs::create_dir_all(&packages).map_err(|why| why.to_string())?;
    run_program(Command::new("apt-get").args(["download", "prometheus"]).current_dir(&packages))?;
    let list = std::fs::read_dir(&packages).map_err(|why| why.to_string())?;
    for package in list.flatten().filter(|one| one.path().extension().is_some_and(|it| it == "deb"))
    {
        run_program(Command::new("dpkg").arg("-x").arg(package.path()).arg(&unpacked))?;
    }
    let bin = unpacked.join("usr/bin");
    Ok(Tools { prometheus: bin.join("prometheus"), promtool: bin.join("promtool") })
}

/// A running Prometheus. Dropping it ends it.
struct Prometheus {
    child: Child,
    url: String,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Prometheus {
    fn start(tools: &Tools, rules: &Path, service: &Service) -> Result<Self, String> {
        let directory = service.directory();
        let data = directory.join("data");
        let _ = std::fs::remove_dir_all(&data);
        let config = format!(
            "global: {{ scrape_interval: 2s, evaluation_interval: 2s }}\nrule_files: [{:?}]\n\
             scrape_configs:\n  - job_name: tenmil\n    authorization: {{ credentials_file: {:?} }}\n    \
             static_configs: [{{ targets: [{:?}] }}]\n",
            rules.display().to_string(),
            service.token_file().display().to_string(),
            service.api_address()
        );
        let path = directory.join("prometheus.yml");
        std::fs::write(&path, config).map_err(|why| why.to_string())?;
        run_program(Command::new(&tools.promtool).args(["check", "config"]).arg(&path))?;
        let listen = format!("127.0.0.1:{}", free_port()?);
        let log = std::fs::File::create(directory.join("prometheus.log"));
        let mut command = Command::new(&tools.prometheus);
        command.arg(format!("--config.file={}", path.display()));
        command.arg(format!("--storage.tsdb.path={}", data.display()));
        command.arg(format!("--web.listen-address={listen}"));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(log.map_err(|why| why.to_string())?);
        let child = command.spawn().map_err(|why| format!("start prometheus: {why}"))?;
        Ok(Self { child, url: format!("http://{listen}") })
    }

    /// Result of an instant query: series and their values.
    fn query(&self, text: &str) -> Result<Vec<Value>, String> {
        let url = format!("{}/api/v1/query", self.url);
        let answer = curl(&["--get", "--data-urlencode", &format!("query={text}"), &url])?;
        let answer: Value = serde_json::from_str(&answer).map_err(|why| why.to_string())?;
        if answer["status"] != "success" {
            return Err(answer["error"].as_str().unwrap_or("no answer").to_owned());
        }
        Ok(answer["data"]["result"].as_array().cloned().unwrap_or_default())
    }

    /// Waits until a query has series.
    fn await_data(&self, text: &str, until: Instant) -> Result<String, String> {
        loop {
            let found = self.query(text);
            match &found {
                Ok(series) if !series.is_empty() => {
                    let first = series[0]["value"][1].as_str().unwrap_or_default();
                    return Ok(format!("{} series, {first}", series.len()));
                }
                Ok(_) if Instant::now() > until => return Err(format!("no data: {text}")),
                Err(why) if Instant::now() > until => return Err(format!("{why}: {text}")),
                _ => std::thread::sleep(PAUSE),
            }
        }
    }
}

/// Checks the shipped files, and runs every expression against the loaded process.
pub(super) fn check_metrics(
    root: &Path,
    service: &mut Service,
    tools: &Tools,
    report: &mut Report,
) -> Result<(), String> {
    let rules = root.join("packaging/prometheus/tenmil-alerts.yml");
    let read = |path: &Path| {
        std::fs::read_to_string(path).map_err(|why| format!("read {}: {why}", path.display()))
    };
    let checked = run_program(Command::new(&tools.promtool).args(["check", "rules"]).arg(&rules));
    report.check("promtool check rules", checked.map(|_| String::new()));
    let tests = rules.with_extension("test.yml");
    let tested = run_program(Command::new(&tools.promtool).args(["test", "rules"]).arg(&tests));
    report.check("promtool test rules", tested.map(|_| String::new()));
    report.check("promtool check metrics", check_text(service, tools));
    let prometheus = Prometheus::start(tools, &rules, service)?;
    let until = || Instant::now() + DATA_MAX;
    report.check("Prometheus collects it", prometheus.await_data("up == 1", until()));
    let dashboard = read(&root.join("packaging/grafana/tenmil.json"))?;
    let dashboard: Value = serde_json::from_str(&dashboard).map_err(|why| why.to_string())?;
    let until = until();
    for Expression { title, text } in panel_expressions(&dashboard) {
        check_expression(&prometheus, report, &format!("panel {title}"), &text, until);
    }
    for Expression { title, text } in rule_expressions(&read(&rules)?) {
        let text = without_filters(&text);
        check_expression(&prometheus, report, &format!("rule {title}"), &text, until);
    }
    let firing = prometheus.query("ALERTS{alertstate=\"firing\"}");
    report.check(
        "no alert fires while all is well",
        match firing {
            Ok(series) if series.is_empty() => Ok(String::new()),
            Ok(series) => Err(format!("{} alerts: {}", series.len(), series[0]["metric"])),
            Err(why) => Err(why),
        },
    );
    service.kill_far_server();
    let alert = "ALERTS{alertname=\"TenmilAllPathsLost\",alertstate=\"firing\"}";
    let until = Instant::now() + DATA_MAX;
    report.check("an alert fires when the last path is lost", prometheus.await_data(alert, until));
    Ok(())
}

fn check_expression(
    prometheus: &Prometheus,
    report: &mut Report,
    title: &str,
    text: &str,
    until: Instant,
) {
    let result = if MAY_BE_EMPTY.iter().any(|name| text.contains(name)) {
        prometheus.query(text).map(|series| format!("{} series", series.len()))
    } else {
        prometheus.await_data(text, until)
    };
    report.check(title, result);
}

/// The text format, as promtool judges it.
fn check_text(service: &Service, tools: &Tools) -> Result<String, String> {
    let text = service.api(&[], "metrics")?;
    let path = service.directory().join("metrics.txt");
    std::fs::write(&path, &text).map_err(|why| why.to_string())?;
    let file = std::fs::File::open(&path).map_err(|why| why.to_string())?;
    let mut command = Command::new(&tools.promtool);
    run_program(command.args(["check", "metrics"]).stdin(file))?;
    Ok(format!("{} lines", text.lines().count()))
}
