//! What is run as the service: a program of the build, or the installed Debian package with the user, the
//! environment and the arguments of its unit.
//!
//! The package is installed by dpkg in a mount namespace, over `/etc`, `/usr`, `/var` and `/run` of this
//! machine, which are not changed:
//!
//! ```text
//!   cargo xtask operate --package ─ unshare, overlays, dpkg ─▶ the same program with --packaged
//!                                                                │ setpriv to the user of the unit
//!                                                                ▼
//!                                                   /usr/bin/tenmil serve --config /etc/tenmil/target.toml …
//! ```

use std::path::{Path, PathBuf};
use std::process::Command;

use super::run_program;

/// Where the service finds its files, and how it is started.
#[derive(Clone, Debug)]
pub(super) struct Installation {
    pub(super) binary: PathBuf,
    /// Directory of pools and mirrors.
    pub(super) data: PathBuf,
    pub(super) config: PathBuf,
    pub(super) control: PathBuf,
    pub(super) token: PathBuf,
    /// Arguments of the service.
    pub(super) arguments: Vec<String>,
    unit: Option<Unit>,
}

/// What the unit file says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Unit {
    user: String,
    umask: String,
    environment: Vec<String>,
    exec_start: Vec<String>,
}

const UNIT: &str = "/usr/lib/systemd/system/tenmil.service";
/// Runs the rest of its arguments with a package installed: the package, an empty directory, and a command.
const INSTALL: &str = r#"
set -eu
package=$1 layer=$2
shift 2
mkdir -p "$layer"
mount -t tmpfs none "$layer"
for name in etc usr var; do
    mkdir -p "$layer/$name/upper" "$layer/$name/work"
    mount -t overlay overlay -o "lowerdir=/$name,upperdir=$layer/$name/upper,workdir=$layer/$name/work" "/$name"
done
mount -t tmpfs -o mode=755 none /run
export DEBIAN_FRONTEND=noninteractive
# Its dependencies are those of a Debian system; what the checks need of them is missed there.
PATH=/usr/sbin:/usr/bin:/sbin:/bin dpkg --force-depends --install "$package" >&2
exec "$@"
"#;

/// Runs this program again, with the package installed. Returns whether it has succeeded.
pub(super) fn run_with_package(package: &Path, directory: &Path) -> Result<bool, String> {
    let program = std::env::current_exe().map_err(|why| format!("this program: {why}"))?;
    let arguments = std::env::args_os().skip(1).filter(|argument| argument != "--package");
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "--", "sh", "-c", INSTALL, "sh"]);
    command.arg(package).arg(directory.join("layer")).arg(program).args(arguments);
    let status = command.arg("--packaged").status().map_err(|why| format!("run unshare: {why}"))?;
    Ok(status.success())
}

impl Installation {
    /// A program of the build, with all files in `directory`.
    pub(super) fn of_program(binary: &Path, directory: &Path) -> Self {
        let config = directory.join("target.toml");
        let arguments = ["serve".to_owned(), "--config".to_owned(), config.display().to_string()];
        Self {
            binary: binary.to_owned(),
            data: directory.to_owned(),
            config,
            control: directory.join("control"),
            token: directory.join("token"),
            arguments: arguments.into(),
            unit: None,
        }
    }

    /// The installed package.
    pub(super) fn of_package() -> Result<Self, String> {
        let text = std::fs::read_to_string(UNIT).map_err(|why| format!("{UNIT}: {why}"))?;
        let unit = Unit::parse(&text)?;
        // Made by systemd, as RuntimeDirectory= says.
        let user = unit.user.as_str();
        let mut install = Command::new("install");
        install.args(["-d", "-o", user, "-g", user, "-m", "0700", "/run/tenmil"]);
        run_program(&mut install)?;
        let (binary, arguments) = unit.exec_start.split_first().ok_or("ExecStart= is empty")?;
        Ok(Self {
            binary: binary.into(),
            data: "/var/lib/tenmil".into(),
            config: "/etc/tenmil/target.toml".into(),
            control: "/run/tenmil/control".into(),
            token: "/etc/tenmil/token".into(),
            arguments: arguments.to_vec(),
            unit: Some(unit),
        })
    }

    /// Whether the package is run.
    pub(super) fn is_package(&self) -> bool {
        self.unit.is_some()
    }

    /// The program, as the user and in the environment of the service.
    pub(super) fn command(&self) -> Command {
        let Some(Unit { user, umask, environment, .. }) = &self.unit else {
            return Command::new(&self.binary);
        };
        let mut command = Command::new("setpriv");
        command.arg(format!("--reuid={user}")).arg(format!("--regid={user}"));
        command.args(["--init-groups", "--bounding-set=-all", "--inh-caps=-all"]);
        command.args(["--no-new-privs", "env", "-i", "PATH=/usr/bin:/bin"]).args(environment);
        let script = format!("umask {umask}; cd /; exec \"$0\" \"$@\"");
        command.args(["sh", "-c", &script]).arg(&self.binary);
        command
    }

    /// Gives a file that was written for the service to its user.
    pub(super) fn give(&self, path: &Path) -> Result<(), String> {
        let Some(Unit { user, .. }) = &self.unit else { return Ok(()) };
        run_program(Command::new("chown").arg(format!("{user}:{user}")).arg(path)).map(drop)
    }
}

impl Unit {
    fn parse(text: &str) -> Result<Self, String> {
        let mut unit = Self { umask: "0022".to_owned(), ..Self::default() };
        for line in text.lines() {
            match line.split_once('=') {
                Some(("User", user)) => unit.user = user.to_owned(),
                Some(("UMask", umask)) => unit.umask = umask.to_owned(),
                Some(("Environment", assignment)) => unit.environment.push(assignment.to_owned()),
                Some(("ExecStart", command)) => {
                    unit.exec_start = command.split_whitespace().map(str::to_owned).collect();
                }
                _ => {}
            }
        }
        if unit.user.is_empty() || unit.exec_start.is_empty() {
            return Err(format!("{UNIT}: no User= or no ExecStart=, expected both"));
        }
        Ok(unit)
    }
}

#[cfg(test)]
mod tests {
    use super::Unit;

    #[test]
    fn unit_file_says_who_runs_what() {
        let text = include_str!("../../../../packaging/systemd/tenmil.service");
        let unit = Unit::parse(text).unwrap();
        assert_eq!((unit.user.as_str(), unit.umask.as_str()), ("tenmil", "0077"));
        assert_eq!(unit.exec_start[..2], ["/usr/bin/tenmil", "serve"]);
        assert!(unit.environment.contains(&"TENMIL_RUNTIME_DIR=/run/tenmil".to_owned()));
        assert!(Unit::parse("[Service]\nUser=tenmil\n").is_err());
    }
}
