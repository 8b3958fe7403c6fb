//! Options of commands that run for some time: where they can be controlled, and by whom.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use clap::Args;
use tenmil_base::Error;
use tenmil_linux::key_file::read_key_file;
use tenmil_linux::sandbox::find_group;
use tenmil_rpc::{ControlListeners, ControlToken, ServerError};

/// Where a process can be controlled besides its socket in the runtime directory.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Control")]
pub(super) struct ControlOptions {
    /// Control socket at this path, besides the one in the runtime directory [default of serve:
    /// $TENMIL_CONTROL]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,

    /// Group whose members may use the socket of --control
    #[arg(long, value_name = "GROUP")]
    control_group: Option<String>,

    /// Serve the HTTP API at this loopback address too, such as 127.0.0.1:9010; may be repeated
    #[arg(long, value_name = "ADDRESS", value_parser = parse_address)]
    control_listen: Vec<SocketAddr>,

    /// File with the token of TCP clients of the API; without it they can change nothing
    #[arg(long, value_name = "FILE")]
    control_token: Option<PathBuf>,

    /// Name of this process, by which --instance of other commands finds it
    #[arg(long, value_name = "NAME")]
    instance: Option<String>,
}

/// Listeners that are open, and the name of the process.
#[derive(Debug, Default)]
pub(super) struct PreparedControl {
    pub(super) listeners: ControlListeners,
    pub(super) instance: Option<String>,
}

/// Variable that names the socket of --control, of the server and of its clients.
pub(super) const CONTROL_VARIABLE: &str = "TENMIL_CONTROL";

/// Longest file with a token.
const TOKEN_FILE_MAX: u64 = 1024;

/// What the command line asks for, until the control server of the process takes it. A process has one
/// command line and at most one control server.
static PREPARED: Mutex<Option<PreparedControl>> = Mutex::new(None);

impl ControlOptions {
    /// Opens the listeners, so that an address that cannot be used ends the command before it does
    /// anything, and while it has all rights.
    pub(super) fn prepare(&self) -> Result<(), Error> {
        let mut listeners = ControlListeners::new();
        let group = self.group()?;
        if let Some(path) = &self.control {
            listeners.add_socket(path, group).map_err(listen_error("--control"))?;
        } else if let Some(group) = &self.control_group {
            let text = format!("--control-group {group}: expected --control PATH as well");
            return Err(Error::usage(text).with_hint(
                "the runtime directory is its owner's alone, so a group needs a socket elsewhere",
            ));
        }
        if let Some(token) = self.token()? {
            listeners.set_token(token);
        }
        for address in &self.control_listen {
            listeners.add_tcp(*address).map_err(listen_error("--control-listen"))?;
        }
        let prepared = PreparedControl { listeners, instance: self.instance.clone() };
        *PREPARED.lock().unwrap_or_else(PoisonError::into_inner) = Some(prepared);
        Ok(())
    }

    /// The same with the socket that the environment names, if the command line names none.
    pub(super) fn or_from_environment(&self) -> Self {
        let variable = std::env::var_os(CONTROL_VARIABLE).filter(|path| !path.is_empty());
        let control = self.control.clone().or_else(|| variable.map(PathBuf::from));
        Self { control, ..self.clone() }
    }

    /// Path of the socket.
    pub(super) fn socket_path(&self) -> Option<&Path> {
        self.control.as_deref()
    }

    fn group(&self) -> Result<Option<u32>, Error> {
        let Some(name) = &self.control_group else { return Ok(None) };
        let found = find_group(name)
            .map_err(|why| Error::environment(format!("--control-group {name}: {why}")))?;
        match found {
            Some(group) => Ok(Some(group)),
            None => {
                let text = format!("--control-group {name}: no such group, expected one");
                let hint = format!("create it: sudo groupadd --system {name}");
                Err(Error::usage(text).with_hint(hint))
            }
        }
    }

    fn token(&self) -> Result<Option<ControlToken>, Error> {
        let Some(path) = &self.control_token else { return Ok(None) };
        let refused = |why: String| Error::usage(format!("--control-token: {why}"));
        let bytes = read_key_file(path, TOKEN_FILE_MAX).map_err(|why| refused(why.to_string()))?;
        let token = ControlToken::parse(&String::from_utf8_lossy(&bytes))
            .map_err(|why| refused(format!("{}: {why}", path.display())))?;
        Ok(Some(token))
    }
}

/// Takes what [`ControlOptions::prepare`] has opened.
pub(super) fn take_prepared() -> PreparedControl {
    PREPARED.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default()
}

fn listen_error(option: &'static str) -> impl Fn(ServerError) -> Error {
    move |refused| {
        let text = format!("{option}: {refused}");
        match refused.kind() {
            std::io::ErrorKind::PermissionDenied => Error::environment(text),
            _ => Error::usage(text),
        }
    }
}

fn parse_address(text: &str) -> Result<SocketAddr, String> {
    let expected = "expected a loopback address and a port, such as 127.0.0.1:9010 or [::1]:9010";
    let address: SocketAddr = text.parse().map_err(|_| format!("`{text}`: {expected}"))?;
    if address.ip().is_loopback() {
        return Ok(address);
    }
    Err(format!(
        "`{text}` can be reached from other machines, and the API is not encrypted: {expected}; \
         other machines reach it through ssh -L or a proxy with TLS"
    ))
}

#[cfg(test)]
mod tests {
    use super::{ControlOptions, parse_address};

    #[test]
    fn only_loopback_addresses_are_accepted() {
        for text in ["127.0.0.1:9010", "127.8.0.1:0", "[::1]:9010"] {
            assert_eq!(parse_address(text).unwrap().to_string(), text);
        }
        for text in ["0.0.0.0:9010", "[::]:1", "192.0.2.1:1"] {
            let refused = parse_address(text).unwrap_err();
            assert!(refused.contains("can be reached from other machines"), "{refused}");
        }
        for text in ["", "9010", "localhost:9010", "127.0.0.1"] {
            let refused = parse_address(text).unwrap_err();
            assert!(refused.contains("expected a loopback address"), "{refused}");
        }
    }

    #[test]
    fn group_without_a_socket_and_an_unknown_group_are_refused() {
        let options = |group: &str| ControlOptions {
            control_group: Some(group.to_owned()),
            ..ControlOptions::default()
        };
        let refused = options("0").prepare().unwrap_err();
        assert!(refused.text.contains("expected --control PATH"), "{refused}");
        let refused = options("no-such-group").prepare().unwrap_err();
        assert!(refused.text.contains("no such group"), "{refused}");
        assert!(refused.hint.unwrap().contains("groupadd"));
    }
}
