//! The served process: NVMe/TCP subsystems over RAM, a pool and a mirror, a path to itself, and load.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::installation::Installation;
use super::{curl, run_program};

/// Time limit for the start.
const START_MAX: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(50);
const TOKEN: &str = "operate-0123456789abcdef";
/// NQNs of the two subsystems.
pub(super) const DISK: &str = "nqn.2026-01.org.tenmil:disk";
const VOLUME: &str = "nqn.2026-01.org.tenmil:volume";

/// A serving process and the loads on it. Dropping it ends them.
#[derive(Debug)]
pub(super) struct Service {
    installation: Installation,
    directory: PathBuf,
    port: u16,
    api_port: u16,
    children: Vec<Child>,
}

impl Service {
    /// Starts two servers: a far one, and the one that is looked at, with a path to the far one.
    pub(super) fn start(installation: Installation, directory: &Path) -> Result<Self, String> {
        let [far, port, api_port] = [free_port()?, free_port()?, free_port()?];
        let mut service = Self {
            installation,
            directory: directory.to_owned(),
            port,
            api_port,
            children: Vec::new(),
        };
        let Installation { data, control, .. } = &service.installation;
        let data = data.clone();
        let _ = std::fs::remove_file(control);
        for name in ["pool", "leg-a", "leg-b"] {
            let _ = std::fs::remove_file(data.join(name));
        }
        let at = |name: &str| data.join(name).display().to_string();
        service.write_file(&service.installation.token, TOKEN)?;
        let [pool, a, b] = ["pool", "leg-a", "leg-b"].map(at);
        service.run(&["pool", "create", &format!("file:{pool}?size=256m"), "--name", "tank"])?;
        let volume = format!("volume:[file:{pool}]/db");
        service.run(&["volume", "create", &volume, "--size", "64m"])?;
        let legs = [a, b].map(|leg| format!("file:{leg}?size=64m"));
        service.run(&["mirror", "create", &legs[0], &legs[1]])?;
        service
            .start_server("far", &["serve", "ram:64m", "-l", &format!("tcp://127.0.0.1:{far}")])?;
        let path = format!("tcp://127.0.0.1:{far}/{DISK}");
        let mirror = format!("mirror:[{}],[{}]", legs[0], legs[1]);
        let subsystem = |nqn: &str, uris: [&str; 2]| {
            let [one, other] =
                uris.map(|uri| format!("[[subsystem.namespace]]\nuri = \"{uri}\"\n\n"));
            format!("[[subsystem]]\nnqn = \"{nqn}\"\nallow-any-host = true\n\n{one}{other}")
        };
        let config = format!(
            "# kept\n[[listener]]\naddress = \"127.0.0.1:{port}\"\n\n{}{}",
            subsystem(DISK, ["ram:256m", &path]),
            subsystem(VOLUME, [&volume, &mirror]),
        );
        service.write_file(&service.installation.config, &config)?;
        let Installation { control, token, arguments, .. } = service.installation.clone();
        let (control, token) = (control.display().to_string(), token.display().to_string());
        let listen = format!("127.0.0.1:{api_port}");
        let mut arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        arguments.extend(["--control", &control, "--control-listen", &listen]);
        arguments.extend(["--control-token", &token]);
        service.start_server("served", &arguments)?;
        Ok(service)
    }

    /// Address of the page, ending in a slash.
    pub(super) fn url(&self) -> String {
        format!("http://127.0.0.1:{}/", self.api_port)
    }

    /// Host and port of the API.
    pub(super) fn api_address(&self) -> String {
        format!("127.0.0.1:{}", self.api_port)
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.installation.control.clone()
    }

    pub(super) fn token(&self) -> &'static str {
        TOKEN
    }

    pub(super) fn token_file(&self) -> PathBuf {
        self.installation.token.clone()
    }

    pub(super) fn config_file(&self) -> &Path {
        &self.installation.config
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Starts load on every namespace, for `seconds`.
    pub(super) fn start_load(&mut self, seconds: u32) -> Result<(), String> {
        for (nqn, namespace) in [(DISK, 1), (DISK, 2), (VOLUME, 1), (VOLUME, 2)] {
            self.start_perf(nqn, namespace, seconds)?;
        }
        Ok(())
    }

    /// Starts `tenmil perf` on a namespace of the served process.
    pub(super) fn start_perf(
        &mut self,
        nqn: &str,
        namespace: u32,
        seconds: u32,
    ) -> Result<(), String> {
        let uri = format!("tcp://127.0.0.1:{}/{nqn}/{namespace}", self.port);
        let log = std::fs::File::create(self.directory.join("perf.log"))
            .map_err(|why| why.to_string())?;
        let mut command = Command::new(&self.installation.binary);
        command.args(["perf", &uri, "-w", "randrw", "-q", "4", "-t", &seconds.to_string()]);
        command.arg("--overwrite").stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.children.push(command.spawn().map_err(|why| format!("start perf: {why}"))?);
        Ok(())
    }

    /// Result of a request to the API.
    pub(super) fn api(&self, arguments: &[&str], path: &str) -> Result<String, String> {
        let socket = self.socket().display().to_string();
        let url = format!("http://tenmil/{path}");
        curl(&[&["--fail-with-body", "--unix-socket", &socket], arguments, &[&url]].concat())
    }

    /// Kills the server that the served process has its path to.
    pub(super) fn kill_far_server(&mut self) {
        if let Some(far) = self.children.first_mut() {
            let _ = far.kill();
            let _ = far.wait();
        }
    }

    fn run(&self, arguments: &[&str]) -> Result<String, String> {
        run_program(self.installation.command().args(arguments))
    }

    /// Starts `tenmil serve` and waits for its ready message.
    fn start_server(&mut self, name: &str, arguments: &[&str]) -> Result<(), String> {
        let file = |kind: &str| self.directory.join(format!("{name}.{kind}"));
        let open = |path: PathBuf| std::fs::File::create(path).map_err(|why| why.to_string());
        let mut command = self.installation.command();
        command.args(arguments).args(["--json", "--exit-with-parent"]);
        command.stdin(Stdio::null()).stdout(open(file("out"))?).stderr(open(file("err"))?);
        let mut child = command.spawn().map_err(|why| format!("start {name}: {why}"))?;
        let begun = Instant::now();
        while !std::fs::read_to_string(file("out")).unwrap_or_default().contains('\n') {
            if !matches!(child.try_wait(), Ok(None)) || begun.elapsed() > START_MAX {
                let _ = child.kill();
                let _ = child.wait();
                let said = std::fs::read_to_string(file("err")).unwrap_or_default();
                return Err(format!("start {name}: {}", said.trim()));
            }
            std::thread::sleep(PAUSE);
        }
        self.children.push(child);
        Ok(())
    }

    /// Writes a file that only the service may access.
    fn write_file(&self, path: &Path, text: &str) -> Result<(), String> {
        use std::io::Write;
        use std::os::unix::fs::OpenOptionsExt;
        let mut options = std::fs::OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let file = options.open(path);
        let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
        written.map_err(|why| format!("{}: {why}", path.display()))?;
        self.installation.give(path)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        for mut child in self.children.drain(..).rev() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A port of loopback that was free a moment ago.
pub(crate) fn free_port() -> Result<u16, String> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(|why| format!("free port: {why}"))?;
    listener.local_addr().map(|address| address.port()).map_err(|why| why.to_string())
}
