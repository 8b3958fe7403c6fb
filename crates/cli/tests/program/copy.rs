//! `tenmil copy` from the command line.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const MIB: u64 = 1 << 20;

/// A folder with a source: data, a hole, zeroes that take room, data.
struct CopyTestDirectory(tempfile::TempDir);

impl CopyTestDirectory {
    fn new(size: u64) -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        let file = std::fs::File::create(place.path("source")).unwrap();
        file.set_len(size).unwrap();
        let part = usize::try_from(size / 4).unwrap();
        let bytes: Vec<u8> = (0..part as u64 / 8)
            .flat_map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
            .collect();
        file.write_all_at(&bytes, 0).unwrap();
        file.write_all_at(&vec![0; part], size / 2).unwrap();
        file.write_all_at(&bytes, size / 4 * 3).unwrap();
        file.sync_all().unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn uri(&self, name: &str) -> String {
        format!("file:{}", self.path(name).display())
    }

    fn command(&self, source: &str, target: &str, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
        command.args(["copy", source, target]).args(more).env("XDG_RUNTIME_DIR", self.0.path());
        command
    }

    fn copy(&self, more: &[&str]) -> Output {
        self.command(&self.uri("source"), &self.uri("target"), more).output().unwrap()
    }

    fn start(&self, more: &[&str]) -> Child {
        let mut command = self.command(&self.uri("source"), &self.uri("target"), more);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// What another process is told of the copy that runs here.
    fn copy_progress_json(&self) -> Value {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
        command.args(["get", "copy", "--json"]).env("XDG_RUNTIME_DIR", self.0.path());
        let (code, out, error) = code_stdout_and_stderr(&command.output().unwrap());
        assert_eq!(code, Some(0), "{error}");
        serde_json::from_str(&out).unwrap()
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap()
    }

    fn is_copied(&self) -> bool {
        self.bytes("source") == self.bytes("target")
    }
}

fn code_stdout_and_stderr(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// Bytes that a file takes up.
fn allocated_bytes(path: &Path) -> u64 {
    path.metadata().map_or(0, |found| found.blocks() * 512)
}

/// Waits until a copy has written something, and has a record.
fn wait_until_data_and_checkpoint_exist(place: &CopyTestDirectory, child: &mut Child) {
    let end = Instant::now() + Duration::from_secs(60);
    while allocated_bytes(&place.path("target")) == 0 || !place.path("target.resume").exists() {
        assert!(child.try_wait().unwrap().is_none(), "it has ended");
        assert!(Instant::now() < end, "nothing is copied");
        std::thread::yield_now();
    }
}

#[test]
fn zeroes_are_written_without_sparse() {
    let place = CopyTestDirectory::new(16 * MIB);
    for (sparse, written) in [("no", 12 * MIB), ("yes", 8 * MIB)] {
        let (code, out, error) = code_stdout_and_stderr(&place.copy(&[
            "--sparse",
            sparse,
            "--overwrite",
            "--verify",
            "--json",
        ]));
        assert_eq!(code, Some(0), "{error}");
        let json: Value = serde_json::from_str(&out).unwrap();
        // Where holes cannot be told from zeroes, all of the source is zeroes that are written.
        let reported = json["read_bytes"] != 16 * MIB;
        assert!(
            json["written_bytes"] == written || (!reported && sparse == "no"),
            "{sparse}: {json}"
        );
        assert!(place.is_copied());
    }
}

#[test]
fn file_is_copied_with_its_holes_and_compared() {
    let place = CopyTestDirectory::new(16 * MIB);
    let (code, out, error) = code_stdout_and_stderr(&place.copy(&["--verify", "--json"]));
    assert_eq!(code, Some(0), "{error}");
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["copied_bytes"], 16 * MIB);
    assert_eq!(json["verified"]["different_blocks"], 0);
    assert_eq!(json["written_bytes"], 8 * MIB);
    assert!(place.is_copied() && !place.path("target.resume").exists());
    let read = json["read_bytes"].as_u64().unwrap();
    if read == 16 * MIB {
        println!("skipped: this file system does not tell its holes");
    } else {
        assert_eq!(read, 12 * MIB);
        assert!(allocated_bytes(&place.path("target")) < 9 * MIB, "zeroes became a hole");
    }
}

#[test]
fn stopped_copy_prints_how_to_resume_and_resumes() {
    let place = CopyTestDirectory::new(64 * MIB);
    let slow = ["--limit-bytes", "4m", "--request-size", "64k"];
    let mut child = place.start(&slow);
    wait_until_data_and_checkpoint_exist(&place, &mut child);
    let row = place.copy_progress_json();
    assert_eq!((&row["source"], &row["phase"]), (&place.uri("source").into(), &"copying".into()));
    let (done, size) = (row["done_bytes"].as_u64().unwrap(), row["size_bytes"].as_u64().unwrap());
    assert!(done < size && size == 64 * MIB, "{row}");
    let status = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(status.success());
    let (code, out, error) = code_stdout_and_stderr(&child.wait_with_output().unwrap());
    assert_eq!(code, Some(130), "{error}");
    assert!(out.ends_with("  interrupted\n"), "{out}");
    assert!(error.contains("hint: To go on from there: tenmil copy file:"), "{error}");

    let mut child = place.start(&slow);
    wait_until_data_and_checkpoint_exist(&place, &mut child);
    child.kill().unwrap();
    child.wait().unwrap();
    let record: Value = serde_json::from_slice(&place.bytes("target.resume")).unwrap();
    let until = record["until"].as_u64().unwrap();
    assert!(until > 0, "{record}");

    let (code, out, error) = code_stdout_and_stderr(&place.copy(&["--verify", "--json"]));
    assert_eq!(code, Some(0), "{error}");
    assert!(error.contains(&format!("note: resuming at byte {until} of ")), "{error}");
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["resumed_at_byte"], until);
    assert!(place.is_copied() && !place.path("target.resume").exists());
}

#[test]
fn checkpoint_of_another_copy_is_rejected() {
    let place = CopyTestDirectory::new(MIB);
    std::fs::write(place.path("target.resume"), "{}").unwrap();
    let (code, _, error) = code_stdout_and_stderr(&place.copy(&[]));
    assert_eq!(code, Some(2));
    assert!(error.contains("it is not a record") && error.contains("hint: To start over, remove "));
    let other = place.path("other").display().to_string();
    let (code, _, error) = code_stdout_and_stderr(&place.copy(&["--resume", &other]));
    assert_eq!(code, Some(0), "what was refused has left nothing behind: {error}");
    let memory = place.command(&place.uri("source"), "ram:1m", &["--resume", &other]).output();
    let (code, _, error) = code_stdout_and_stderr(&memory.unwrap());
    assert_eq!(code, Some(2));
    assert!(error.contains("--resume: ram:1m stands on no file"), "{error}");
}

#[test]
fn existing_data_is_named_before_it_is_overwritten() {
    let place = CopyTestDirectory::new(MIB);
    let mut bytes = vec![0x11; 2 << 20];
    bytes[1080..1082].copy_from_slice(&[0x53, 0xef]);
    bytes[1144..1160].copy_from_slice(b"family pictures\0");
    std::fs::write(place.path("target"), &bytes).unwrap();
    let (code, _, error) = code_stdout_and_stderr(&place.copy(&[]));
    assert_eq!(code, Some(2));
    let target = place.path("target").display().to_string();
    let expected = format!("error: copy would destroy what is there: {target} (2097152 bytes; ext");
    assert!(error.starts_with(&expected), "{error}");
    assert!(
        error.contains(" \"family pictures\" 11111111-1111-1111-1111-111111111111 at byte 1080")
    );
    assert!(error.contains("\nhint: To write to them all the same, add --overwrite."), "{error}");
    assert!(place.bytes("target") == bytes, "nothing was touched");
    let (code, _, error) = code_stdout_and_stderr(&place.copy(&["--overwrite"]));
    assert_eq!(code, Some(0), "{error}");
    assert!(error.contains("is 1048576 bytes longer than "), "{error}");
    let (source, target) = (place.bytes("source"), place.bytes("target"));
    assert!(target[..1 << 20] == source && target[1 << 20..] == bytes[1 << 20..]);
}

#[test]
fn silently_corrupting_target_is_detected_by_comparison() {
    let place = CopyTestDirectory::new(MIB);
    let target = format!("fault:[{}?size=1m]?rule=corrupt:write@100-100", place.uri("target"));
    let output = place.command(&place.uri("source"), &target, &["--verify"]).output().unwrap();
    let (code, out, error) = code_stdout_and_stderr(&output);
    assert_eq!(code, Some(4), "{out}{error}");
    assert!(out.contains("blocks of 512 bytes differ, the first at byte "), "{out}");
}

#[test]
fn unreadable_blocks_end_the_copy_or_are_reported() {
    let place = CopyTestDirectory::new(MIB);
    let source = format!("fault:[{}]?rule=error:read@100-101", place.uri("source"));
    let output = place.command(&source, &place.uri("target"), &[]).output().unwrap();
    let (code, _, error) = code_stdout_and_stderr(&output);
    assert_eq!(code, Some(3), "{error}");
    assert!(error.contains("read of the source, bytes 51200 to 51711: "), "{error}");
    let skip = ["--on-error", "skip"];
    let output = place.command(&source, &place.uri("target"), &skip).output().unwrap();
    let (code, out, error) = code_stdout_and_stderr(&output);
    assert_eq!(code, Some(3), "{error}");
    assert!(out.contains("could not be read, zeroes now: bytes 51200 to 52223"), "{out}");
    let (mut source, target) = (place.bytes("source"), place.bytes("target"));
    source[51_200..52_224].fill(0);
    assert!(source == target);
}

#[test]
fn invalid_arguments_are_rejected_by_name() {
    let place = CopyTestDirectory::new(MIB);
    let source = place.uri("source");
    std::fs::write(place.path("odd"), [1; 1300]).unwrap();
    for (source, target, expected) in [
        (&*source, "ram:512k", "it has 524288 bytes, expected at least the 1048576 of file:"),
        (&source, &source, "this process has it open already"),
        (&place.uri("odd"), "ram:1m", "the last 276 bytes would be lost"),
        (&format!("emu:{}", place.uri("odd")), "ram:1m", "the last 276 bytes would be lost"),
        (
            &format!("delay:[fault:[{}]]", place.uri("odd")),
            "ram:1m",
            "the last 276 bytes would be lost",
        ),
        ("file:/no/such/file", "ram:1m", "expected a file that can be read"),
        (&source, "tape:", "no devices of kind `tape`"),
    ] {
        let output = place.command(source, target, &["--overwrite"]).output().unwrap();
        let (code, _, error) = code_stdout_and_stderr(&output);
        assert_eq!(code, Some(2), "{error}");
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn interrupted_comparison_keeps_the_checkpoint_and_prints_how_to_resume() {
    let place = CopyTestDirectory::new(MIB);
    let target = format!("fault:[{}?size=1m]?rule=error:read@100-100", place.uri("target"));
    for go in ["first", "second"] {
        let output = place.command(&place.uri("source"), &target, &["--verify"]).output().unwrap();
        let (code, out, error) = code_stdout_and_stderr(&output);
        assert_eq!(code, Some(3), "the {go} time: {error}");
        assert!(out.contains("flushed: all of it is on stable media"), "{out}");
        assert!(error.contains("read of the target, bytes "), "{error}");
        assert!(error.contains("hint: To go on from there: tenmil copy file:"), "{error}");
        assert!(place.path("target.resume").exists(), "the {go} time");
        assert!(place.is_copied());
    }
}

#[test]
fn rejected_copy_leaves_the_target_unchanged() {
    let place = CopyTestDirectory::new(MIB);
    let (code, _, error) =
        code_stdout_and_stderr(&place.copy(&["-o", "512", "--resume", "/no/such/folder/record"]));
    assert_eq!(code, Some(1), "{error}");
    let (code, _, error) = code_stdout_and_stderr(&place.copy(&["-o", "100"]));
    assert_eq!(code, Some(2), "{error}");
    let (code, _, error) = code_stdout_and_stderr(&place.copy(&[]));
    assert_eq!(code, Some(0), "{error}");

    let grown = format!("{}?size=2m", place.uri("target"));
    for (text, more) in [(None, None), (Some("{}"), Some("--overwrite")), (Some("{}"), None)] {
        if let Some(text) = text {
            std::fs::write(place.path("target.resume"), text).unwrap();
        }
        let more: Vec<&str> = more.into_iter().collect();
        let (code, _, error) = code_stdout_and_stderr(
            &place.command(&place.uri("source"), &grown, &more).output().unwrap(),
        );
        assert_eq!(code, Some(2), "{more:?}: {error}");
        assert!(place.is_copied(), "{more:?}: it is as long as it was");
    }
}

#[test]
fn rejected_copy_removes_created_files_and_restores_empty_ones() {
    let place = CopyTestDirectory::new(MIB);
    assert_eq!(code_stdout_and_stderr(&place.copy(&["-o", "100"])).0, Some(2));
    assert!(!place.path("target").exists());
    let file = std::fs::File::create(place.path("target")).unwrap();
    file.set_len(MIB).unwrap();
    let (code, _, error) = code_stdout_and_stderr(&place.copy(&[]));
    if error.contains("nothing but zeroes at both ends") {
        return println!("skipped: this file system does not tell its holes");
    }
    assert_eq!(code, Some(0), "{error}");
    assert!(place.is_copied());
}

#[test]
fn checkpoint_of_a_vanished_target_is_rejected() {
    let place = CopyTestDirectory::new(MIB);
    let target = format!("fault:[{}?size=1m]?rule=error:read@100-100", place.uri("target"));
    let source = place.uri("source");
    let output = place.command(&source, &target, &["--verify"]).output().unwrap();
    assert_eq!(code_stdout_and_stderr(&output).0, Some(3));
    assert!(place.path("target.resume").exists());
    // The file is the same one as far as can be told, and holds nothing of what was copied.
    std::fs::File::create(place.path("target")).unwrap();
    let (code, _, error) =
        code_stdout_and_stderr(&place.command(&source, &target, &[]).output().unwrap());
    assert_eq!(code, Some(2), "{error}");
    let expected =
        "it did not exist or was empty, and the record states that 1048576 bytes are on it";
    assert!(error.contains(expected), "{error}");
    assert_eq!(place.path("target").metadata().unwrap().len(), 0);
    std::fs::remove_file(place.path("target.resume")).unwrap();
    assert_eq!(code_stdout_and_stderr(&place.copy(&[])).0, Some(0));
    assert!(place.is_copied());
}

#[test]
fn checkpoint_replaces_no_other_file() {
    let place = CopyTestDirectory::new(MIB);
    std::fs::write(place.path("target.resume.new"), "mine").unwrap();
    let resume = place.path("disk").display().to_string();
    let target = place.uri("disk.new");
    let output = place.command(&place.uri("source"), &target, &["--resume", &resume]).output();
    let (code, _, error) = code_stdout_and_stderr(&output.unwrap());
    assert_eq!(code, Some(0), "{error}");
    assert!(place.bytes("disk.new") == place.bytes("source"));
    assert_eq!(code_stdout_and_stderr(&place.copy(&[])).0, Some(0));
    assert_eq!(place.bytes("target.resume.new"), b"mine");

    for name in ["source", "target"] {
        let path = place.path(name).display().to_string();
        let (code, _, error) =
            code_stdout_and_stderr(&place.copy(&["--resume", &path, "--overwrite"]));
        assert_eq!(code, Some(2), "{error}");
        assert!(error.contains(&format!("{path} is what the {name} stands on")), "{error}");
        assert!(place.is_copied());
    }
    let folder = place.path("folder").display().to_string();
    std::fs::create_dir(&folder).unwrap();
    let (code, _, error) =
        code_stdout_and_stderr(&place.copy(&["--resume", &folder, "--overwrite"]));
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains("expected a file"), "{error}");
    let mut names: Vec<String> = std::fs::read_dir(place.0.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let expected = ["disk.new", "folder", "source", "target", "target.resume.new"];
    names.retain(|name| !name.starts_with("tenmil"));
    assert_eq!(names, expected);
}

#[test]
fn devices_without_identity_are_resumed_only_on_request() {
    let place = CopyTestDirectory::new(MIB);
    let target = format!("fault:[{}?size=1m]?rule=error:read@100-100", place.uri("target"));
    let source = format!("emu:{}", place.uri("source"));
    let copy = |more: &[&str]| {
        code_stdout_and_stderr(&place.command(&source, &target, more).output().unwrap())
    };
    let (code, _, error) = copy(&["--verify"]);
    assert_eq!(code, Some(3), "{error}");
    assert!(error.lines().any(|line| line.ends_with(" --verify --overwrite")), "{error}");
    let (code, _, error) = copy(&[]);
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains(&format!(": {source} cannot be identified, expected ")), "{error}");
    assert!(error.contains("; to resume all the same, add --overwrite."), "{error}");
    let (code, _, error) = copy(&["--overwrite"]);
    assert_eq!(code, Some(0), "{error}");
    assert!(
        error.contains(&format!(
            "note: {source} cannot be identified; assuming it is the device of the record"
        )),
        "{error}"
    );
}
