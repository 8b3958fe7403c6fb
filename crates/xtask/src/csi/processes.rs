//! The processes of a test: a storage server with a pool, and the driver.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tenmil_base::{Random, Span};
use tenmil_rpc::RpcClient;

use crate::operate::run_program;

/// Storage server and driver, which end when it is dropped.
#[derive(Debug)]
pub(super) struct DriverStack {
    directory: PathBuf,
    driver: PathBuf,
    server_process: Child,
    driver_process: Child,
}

/// Size of the pool, of which little is written.
const POOL_BYTES: &str = "4g";
const NODE: &str = "test";
const START_TIME_MAX: Duration = Duration::from_secs(40);
const SELF_TEST_TIME_MAX: Duration = Duration::from_secs(300);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Keeps the pool open while no other volume of it is served; no host may connect to it.
const CONFIG: &str = r#"[[listener]]
address = "127.0.0.1:0"

[[subsystem]]
nqn = "nqn.2026-01.org.tenmil:keep"
allowed-hosts = []

[[subsystem.namespace]]
uri = "volume:[file:POOL]/keep"
"#;

impl DriverStack {
    /// Makes a pool, serves it, and starts the driver. The directory is made anew.
    pub(super) fn start(tenmil: &Path, driver: &Path, directory: PathBuf) -> Result<Self, String> {
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(&directory).map_err(|why| why.to_string())?;
        let pool = directory.join("pool");
        let uri = format!("file:{}", pool.display());
        let tenmil_command = || Command::new(tenmil);
        run_program(
            tenmil_command().args(["pool", "create"]).arg(format!("{uri}?size={POOL_BYTES}")),
        )?;
        let keep = format!("{}/keep", pool.display());
        run_program(tenmil_command().args(["volume", "create", &keep, "--size", "1m"]))?;
        let config = CONFIG.replace("POOL", &pool.display().to_string());
        write(&directory.join("target.toml"), &config)?;
        let mut server = tenmil_command();
        server.args(["serve", "--config", "target.toml", "--json", "--exit-with-parent"]);
        server.args(["--control", "control.sock"]).current_dir(&directory);
        let server_process = spawn(server, &directory, "server")?;
        let driver_process = start_driver(driver, &directory)?;
        let driver = driver.to_owned();
        Ok(Self { directory, driver, server_process, driver_process })
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Socket of the driver.
    pub(super) fn socket(&self) -> PathBuf {
        self.directory.join("csi.sock")
    }

    /// Whether every volume, export, mount and loop device of the driver is gone.
    pub(super) fn check_nothing_is_left(&self) -> Result<String, String> {
        let socket = self.directory.join("control.sock");
        let limit = Span::from_secs(20);
        let client = RpcClient::connect(&socket, limit);
        let mut client = client.map_err(|error| error.message)?;
        let mut names = |method: &str, member: &str| -> Result<Vec<String>, String> {
            let rows = client.call_method(method, serde_json::Map::new(), limit);
            let rows = rows.map_err(|error| error.message)?;
            let name = |row: &Value| row[member].as_str().map(str::to_owned);
            Ok(rows.as_array().into_iter().flatten().filter_map(name).collect())
        };
        let (volumes, subsystems) = (names("volumes", "name")?, names("subsystems", "nqn")?);
        if volumes != ["keep"] || subsystems.len() != 1 {
            return Err(format!("volumes {volumes:?}, subsystems {subsystems:?}"));
        }
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let directory = self.directory.display().to_string();
        let is_ours = |line: &&str| line.contains(&directory) || line.contains("/tmp/tenmil-csi-");
        match mounts.lines().find(is_ours) {
            Some(line) => Err(format!("mount {line}")),
            None => Ok(String::new()),
        }
    }

    /// Runs the driver's test of data. With `random`, the driver is killed at random times meanwhile, and started
    /// again. Returns how often.
    pub(super) fn run_self_test(
        &mut self,
        seed: u64,
        mut random: Option<&mut Random>,
    ) -> Result<String, String> {
        let path = |name: &str| self.directory.join(name);
        let log = path("self-test.log");
        let output = File::create(&log).map_err(|why| why.to_string())?;
        let errors = output.try_clone().map_err(|why| why.to_string())?;
        let mut command = Command::new(&self.driver);
        command.arg("--self-test").arg(path("volumes")).args(["--seed", &seed.to_string()]);
        command.arg("--endpoint").arg(format!("unix://{}", self.socket().display()));
        command.stdin(Stdio::null()).stdout(output).stderr(errors);
        let mut child = command.spawn().map_err(|why| why.to_string())?;
        let (begun, mut killed, mut kills) = (Instant::now(), Instant::now(), 0);
        let mut pause = Duration::from_millis(100);
        let status = loop {
            match child.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if begun.elapsed() < SELF_TEST_TIME_MAX => {}
                _ => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(format!("not ended after {} s", SELF_TEST_TIME_MAX.as_secs()));
                }
            }
            if let Some(random) = random.as_deref_mut().filter(|_| killed.elapsed() > pause) {
                self.restart_driver()?;
                kills += 1;
                (killed, pause) = (Instant::now(), Duration::from_millis(20 + random.below(400)));
            }
            std::thread::sleep(POLL_INTERVAL);
        };
        let said = std::fs::read_to_string(&log).unwrap_or_default();
        match (status.success(), kills) {
            (true, 0) => Ok(String::new()),
            (true, kills) => Ok(format!("{kills} kills")),
            (false, kills) => {
                Err(format!("{kills} kills: {}", said.lines().last().unwrap_or_default()))
            }
        }
    }

    /// Process identifiers of the servers of disks.
    fn disk_servers(&self) -> Vec<String> {
        let names = |path: &Path| -> Vec<String> {
            let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        };
        let key =
            |name: &String| Some(name.strip_prefix("disk-")?.strip_suffix(".uri")?.to_owned());
        let keys: Vec<_> = names(&self.directory.join("state")).iter().filter_map(key).collect();
        let is_server = |pid: &String| {
            let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let arguments = String::from_utf8_lossy(&arguments).into_owned();
            keys.iter().any(|key| arguments.contains(&format!("csi-{key}")))
        };
        names(Path::new("/proc")).into_iter().filter(is_server).collect()
    }

    /// Kills the driver, and starts it again.
    fn restart_driver(&mut self) -> Result<(), String> {
        let _ = self.driver_process.kill();
        let _ = self.driver_process.wait();
        self.driver_process = start_driver(&self.driver, &self.directory)?;
        Ok(())
    }
}

impl Drop for DriverStack {
    fn drop(&mut self) {
        let _ = self.driver_process.kill();
        let _ = self.driver_process.wait();
        // Disks of a test that has failed: their servers outlive the driver.
        for pid in self.disk_servers() {
            let _ = Command::new("kill").arg(pid).status();
        }
        let _ = self.server_process.kill();
        let _ = self.server_process.wait();
    }
}

fn start_driver(driver: &Path, directory: &Path) -> Result<Child, String> {
    let this = std::env::current_exe().map_err(|why| why.to_string())?;
    let mut command = Command::new(driver);
    command.arg("--endpoint").arg(format!("unix://{}/csi.sock", directory.display()));
    command.args(["--controller", "--node", "--node-name", NODE, "--topology", "zone=test"]);
    command.args(["--control", "control.sock", "--state-dir", "state", "--attach", "ublk"]);
    command.arg("--disk-server").arg(this).current_dir(directory);
    spawn(command, directory, "driver")
}

/// Starts a process, and waits until it prints its first line.
fn spawn(mut command: Command, directory: &Path, name: &str) -> Result<Child, String> {
    let (out, err) = (directory.join(format!("{name}.out")), directory.join(format!("{name}.err")));
    let output = File::create(&out).map_err(|why| why.to_string())?;
    let errors = OpenOptions::new().create(true).append(true).open(&err);
    let errors = errors.map_err(|why| why.to_string())?;
    command.stdin(Stdio::null()).stdout(output).stderr(errors);
    let mut child = command.spawn().map_err(|why| format!("start the {name}: {why}"))?;
    let begun = Instant::now();
    loop {
        if std::fs::read_to_string(&out).is_ok_and(|text| text.contains('\n')) {
            return Ok(child);
        }
        let is_gone = !matches!(child.try_wait(), Ok(None));
        if is_gone || begun.elapsed() > START_TIME_MAX {
            let _ = child.kill();
            let _ = child.wait();
            let said = std::fs::read_to_string(&err).unwrap_or_default();
            let last = said.lines().last().unwrap_or_default();
            return Err(format!("start the {name}: {last}"));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|why| format!("write {}: {why}", path.display()))
}
