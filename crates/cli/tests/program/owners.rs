//! A pool and a mirror between two processes that call the same namespaces otherwise and cannot ask each
//! other.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

const NQN: &str = "nqn.2026-01.org.tenmil:disk";

/// A process that serves. Dropping it kills it.
struct ServingProcess {
    child: Child,
    ready: String,
}

/// `tenmil` in a directory of files, with control sockets that no other process looks for.
struct OwnerTestDirectory {
    files: tempfile::TempDir,
    sockets: tempfile::TempDir,
}

impl OwnerTestDirectory {
    fn new() -> Self {
        Self { files: tempfile::tempdir().unwrap(), sockets: tempfile::tempdir().unwrap() }
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
        command
            .args(words)
            .current_dir(self.files.path())
            .env("XDG_RUNTIME_DIR", self.sockets.path());
        command
    }

    fn run_successfully(&self, words: &[&str]) {
        let output = self.command(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {output:?}");
    }

    /// Serves something at a listener, if that is not refused. The error is what it says then.
    fn serve(&self, uri: &str, listen: &str) -> Result<ServingProcess, String> {
        let words = ["serve", uri, "--listen", listen, "--json"];
        let mut command = self.command(&words);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut ready = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut ready).unwrap();
        if ready.is_empty() {
            let output = child.wait_with_output().unwrap();
            assert!(!output.status.success());
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        // Its later output is not read, and it does not wait for a reader.
        Ok(ServingProcess { child, ready })
    }

    /// A target of one file. Returns its port.
    fn target(&self, name: &str) -> (ServingProcess, u16) {
        let target = self.serve(&format!("file:{name}?size=32m"), "tcp://127.0.0.1:0").unwrap();
        let at = target.ready.split("tcp://127.0.0.1:").nth(1).unwrap();
        let digits: String = at.chars().take_while(char::is_ascii_digit).collect();
        (target, digits.parse().unwrap())
    }
}

impl Drop for ServingProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Two URIs of the namespace that is served at a port.
fn uri_spellings(port: u16) -> [String; 2] {
    [format!("tcp://127.0.0.1:{port}/{NQN}"), format!("tcp://localhost:{port}/{NQN}?ns=1")]
}

/// Has one process open what the first URI names and another what the second one does: that is refused
/// as long as the first is there.
fn check_second_open_is_rejected_while_owner_lives(
    first: &OwnerTestDirectory,
    [one, two]: [&str; 2],
) {
    let socket =
        |place: &OwnerTestDirectory| format!("nbd:{}", place.sockets.path().join("nbd").display());
    let second = OwnerTestDirectory::new();
    let owner = first.serve(one, &socket(first)).unwrap();
    let refused = second.serve(two, &socket(&second)).err().expect("both have it");
    let expected = format!("process {} on host `", owner.child.id());
    assert!(refused.contains(&expected) && refused.contains("` since 20"), "{refused}");
    // SIGKILL: it says nothing to anybody.
    drop(owner);
    let next = second.serve(two, &socket(&second)).expect("the first is gone");
    let refused = first.serve(one, &socket(first)).err().expect("both have it");
    assert!(refused.contains(&format!("process {} on host `", next.child.id())), "{refused}");
}

#[test]
fn pool_has_one_owner_under_any_uri_and_a_dead_owner_is_ignored() {
    let place = OwnerTestDirectory::new();
    let (_target, port) = place.target("disk");
    let [one, two] = uri_spellings(port);
    place.run_successfully(&["pool", "create", "--overwrite", &one]);
    let volumes = [one, two].map(|uri| format!("volume:[{uri}]/v"));
    place.run_successfully(&["volume", "create", &volumes[0], "--size", "8m"]);
    check_second_open_is_rejected_while_owner_lives(&place, [&volumes[0], &volumes[1]]);
}

#[test]
fn mirror_has_one_owner_under_any_uri_and_a_dead_owner_is_ignored() {
    let place = OwnerTestDirectory::new();
    let ((_a, first), (_b, second)) = (place.target("a"), place.target("b"));
    let [ports_of_a, ports_of_b] = [first, second].map(uri_spellings);
    place.run_successfully(&["mirror", "create", "--overwrite", &ports_of_a[0], &ports_of_b[0]]);
    let mirrors = [0, 1].map(|at| format!("mirror:[{}],[{}]", ports_of_a[at], ports_of_b[at]));
    check_second_open_is_rejected_while_owner_lives(&place, [&mirrors[0], &mirrors[1]]);
}

#[test]
fn two_uris_of_one_namespace_are_rejected_as_a_mirror() {
    let place = OwnerTestDirectory::new();
    let (_target, port) = place.target("disk");
    let [one, two] = uri_spellings(port);
    let words = ["mirror", "create", "--overwrite", &one, &two];
    let output = place.command(&words).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("are one device"), "{error}");
}
