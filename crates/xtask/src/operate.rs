//! `cargo xtask operate`: what an operator uses, with the real programs.
//!
//! ```text
//!   tenmil perf ──NVMe/TCP──▶ tenmil serve ◀──/metrics── Prometheus ◀── expressions of the dashboard and
//!   nbdinfo … ──NBD─────────▶     ▲   ▲                                 of the alert rules
//!                                 │   └── HTTP API ── curl
//!                                 └────── web page ── Chromium: makes a subsystem, loads it, watches it,
//!                                                     limits it and removes it; screenshots
//!   tenmil perf ──NVMe/TCP──▶ tenmil serve ◀──1 000 requests/s, 50 event streams: what they cost the data path
//! ```
//!
//! Everything listens on loopback. A program that is missing is said and its part skipped. The report is
//! printed; screenshots and output are kept in `target/operate`.

mod browser;
mod expressions;
mod installation;
mod load;
mod page_tour;
mod prometheus;
mod service;

use std::path::{Path, PathBuf};
use std::process::Command;

use installation::Installation;
use service::Service;

pub(crate) use service::free_port;

/// Directory of all files.
const DIRECTORY: &str = "target/operate";

/// Options of `cargo xtask operate`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask operate                       everything, with target/debug/tenmil
  cargo xtask operate --only page           the web page alone
  cargo xtask operate --only load           what 1 000 requests per second cost the data path: two minutes
  cargo xtask operate --binary target/release/tenmil
  cargo xtask operate --package             everything, with the Debian package of `cargo xtask package`
Prometheus and promtool are taken from PATH, or downloaded with apt-get and unpacked into target/operate;
Chromium is chromium-headless-shell, chromium or google-chrome of PATH.")]
pub(crate) struct OperateOptions {
    /// Program to run as `tenmil`
    #[arg(long, default_value = "target/debug/tenmil")]
    binary: PathBuf,
    /// Run the Debian package in target/packages instead, as its unit does; needs root
    #[arg(long, conflicts_with = "binary")]
    package: bool,
    /// The package is installed: --package runs this
    #[arg(long, hide = true)]
    packaged: bool,
    /// Part to run; without it, all
    #[arg(long, value_enum)]
    only: Option<Part>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// The HTTP API by curl
    Api,
    /// Prometheus, the dashboard and the alert rules
    Metrics,
    /// The web page in Chromium
    Page,
    /// What requests cost the data path
    Load,
}

/// Results of the checks.
#[derive(Debug, Default)]
pub(crate) struct Report {
    passed: usize,
    failed: Vec<String>,
    skipped: Vec<String>,
}

impl Report {
    /// Prints and counts the result of a check. The text of a success may say what was found.
    pub(crate) fn check(&mut self, what: &str, result: Result<String, String>) {
        match result {
            Ok(found) if found.is_empty() => println!("  ok    {what}"),
            Ok(found) => println!("  ok    {what}: {found}"),
            Err(why) => {
                println!("  FAIL  {what}: {why}");
                self.failed.push(what.to_owned());
                return;
            }
        }
        self.passed += 1;
    }

    /// Prints how many checks passed; returns true if none failed.
    pub(crate) fn print_summary(&self) -> bool {
        let Self { passed, failed, skipped } = self;
        println!("{passed} checks passed, {} failed, {} skipped", failed.len(), skipped.len());
        failed.is_empty()
    }

    /// Notes a part that cannot run here.
    fn skip(&mut self, what: &str, why: &str) {
        println!("  skip  {what}: {why}");
        self.skipped.push(what.to_owned());
    }
}

/// Runs the checks; returns true if none failed.
pub(crate) fn run_operate(options: &OperateOptions) -> Result<bool, String> {
    let root = crate::book::repository_root()?;
    let directory = root.join(DIRECTORY);
    std::fs::create_dir_all(&directory).map_err(|why| format!("{DIRECTORY}: {why}"))?;
    if options.package {
        let package = crate::package::find_package(&root)?;
        return installation::run_with_package(&package, &directory);
    }
    let installation = if options.packaged {
        Installation::of_package()?
    } else {
        let binary = options.binary.canonicalize().map_err(|why| {
            format!("no program at {}: {why}; `cargo build`", options.binary.display())
        })?;
        Installation::of_program(&binary, &directory)
    };
    let mut report = Report::default();
    let is_wanted = |part| options.only.is_none_or(|only| only == part);
    if [Part::Api, Part::Metrics, Part::Page].into_iter().any(is_wanted) {
        check_service(&root, &installation, &directory, is_wanted, &mut report)?;
    }
    if is_wanted(Part::Load) {
        println!("load of the API");
        load::check_load(&installation.binary, &directory, &mut report)?;
    }
    let is_passed = report.print_summary();
    println!("screenshots and output are in {DIRECTORY}");
    Ok(is_passed)
}

/// The parts that look at one service.
fn check_service(
    root: &Path,
    installation: &Installation,
    directory: &Path,
    is_wanted: impl Fn(Part) -> bool,
    report: &mut Report,
) -> Result<(), String> {
    if installation.is_package() {
        println!("the installed package, as its unit runs it");
    }
    let mut service = Service::start(installation.clone(), directory)?;
    if is_wanted(Part::Api) {
        println!("API at {} and {}", service.socket().display(), service.url());
        check_api(&service, report);
    }
    if is_wanted(Part::Metrics) {
        println!("metrics");
        match prometheus::find_tools(directory) {
            Ok(tools) => {
                service.start_load(prometheus::LOAD_SECONDS)?;
                prometheus::check_metrics(root, &mut service, &tools, report)?;
            }
            Err(why) => report.skip("Prometheus", &why),
        }
    }
    if is_wanted(Part::Page) {
        println!("web page");
        match browser::find_program() {
            Some(program) => {
                let toured = page_tour::check_page(&mut service, program, directory, report);
                if let Err(why) = toured {
                    report.check("the page can be driven", Err(why));
                }
            }
            None => report.skip("web page", "no Chromium: apt-get install chromium-headless-shell"),
        }
    }
    Ok(())
}

/// Requests of docs/operator/api.md, by curl.
fn check_api(service: &Service, report: &mut Report) {
    let socket = service.socket().display().to_string();
    let by_socket = |arguments: &[&str]| {
        let mut all = vec!["--unix-socket", &socket];
        all.extend(arguments);
        curl(&all)
    };
    let contains = |text: Result<String, String>, wanted: &str| {
        let text = text?;
        if text.contains(wanted) {
            return Ok(String::new());
        }
        Err(format!("no `{wanted}` in {}", text.chars().take(300).collect::<String>()))
    };
    let process = by_socket(&["http://tenmil/v1/process"]);
    report.check("GET /v1/process by the Unix socket", contains(process, "\"version\""));
    let openapi = by_socket(&["http://tenmil/v1/openapi.json"]);
    report.check("GET /v1/openapi.json", contains(openapi, "\"openapi\""));
    let ready = by_socket(&["http://tenmil/readyz"]);
    report.check("GET /readyz", contains(ready, "serving"));
    let text = by_socket(&["http://tenmil/metrics"]);
    report.check("GET /metrics", contains(text, "# TYPE process_cpu_seconds_total counter"));
    let accept = "Accept: application/openmetrics-text;version=1.0.0";
    let text = by_socket(&["-H", accept, "http://tenmil/metrics"]);
    report.check("GET /metrics as OpenMetrics", contains(text, "# EOF"));
    let refused =
        curl(&["-o", "/dev/null", "-w", "%{http_code}", &format!("{}v1/process", service.url())]);
    report.check("TCP without the token is refused", contains(refused, "401"));
    let page = curl(&["-i", &service.url()]);
    report.check(
        "the page needs no token and has its policy",
        contains(page, "content-security-policy"),
    );
}

/// Runs curl, and returns what it prints.
pub(crate) fn curl(arguments: &[&str]) -> Result<String, String> {
    let mut command = Command::new("curl");
    command.args(["--silent", "--show-error", "--max-time", "10"]).args(arguments);
    run_program(&mut command)
}

/// Runs a program to its end, and returns its standard output.
pub(crate) fn run_program(command: &mut Command) -> Result<String, String> {
    let name = Path::new(command.get_program()).display().to_string();
    let output = command.output().map_err(|why| format!("run {name}: {why}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    let said = text(&output.stdout) + &text(&output.stderr);
    let last: Vec<&str> = said.lines().rev().take(4).collect();
    Err(format!("{name}: {}: {}", output.status, last.join(" | ")))
}
