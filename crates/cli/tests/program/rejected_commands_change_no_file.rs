//! A command that is refused, and one that only looks, leave the files as they were.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use crate::pool::{MIB, PoolTestDirectory};

/// Names and contents of all that lies in a folder: its length, and where it has data.
fn contents(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.is_file());
    let named = |path: std::path::PathBuf| {
        (path.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(path).unwrap())
    };
    files.map(named).collect()
}

/// When what lies in a folder, and the folder, were changed last: also by what was put back.
fn changed_at(directory: &Path) -> BTreeMap<String, (i64, i64)> {
    let files = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.is_file()).chain([directory.to_owned()]);
    let at = |path: std::path::PathBuf| {
        let found = path.metadata().unwrap();
        (path.display().to_string(), (found.ctime(), found.ctime_nsec()))
    };
    files.map(at).collect()
}

/// `O_TMPFILE` with the `O_DIRECTORY` that is a part of it (open(2)).
const O_TMPFILE: i32 = if cfg!(target_arch = "aarch64") { 0o20_040_000 } else { 0o20_200_000 };

/// Whether the file system of a folder has files without a name.
fn supports_o_tmpfile(directory: &Path) -> bool {
    let mut options = std::fs::File::options();
    options.read(true).write(true).custom_flags(O_TMPFILE).open(directory).is_ok()
}

const LEGS: [&str; 3] = ["leg0", "leg1", "leg2"];

fn pool_with_files() -> PoolTestDirectory {
    let pool = PoolTestDirectory::new("16m");
    pool.write("data", 4 * MIB, 1);
    std::fs::write(pool.path("small"), vec![7; MIB]).unwrap();
    pool.stdout_of_success(&["volume", "create", &pool.volume_uri("db"), "--size", "4m"]);
    let legs = LEGS.map(|name| format!("{}?size=8m", pool.file_uri(name)));
    pool.stdout_of_success(&["mirror", "create", &legs[0], &legs[1], &legs[2]]);
    std::fs::copy(pool.path("leg0"), pool.path("copy")).unwrap();
    pool
}

#[test]
fn rejected_command_leaves_every_file_unchanged() {
    let pool = pool_with_files();
    let file = |name: &str| pool.file_uri(name);
    let sized = |name: &str, size: &str| format!("{}?size={size}", pool.file_uri(name));
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("nbd://{}", taken.local_addr().unwrap());
    let (new, grown, store) = (sized("new", "8m"), sized("small", "8m"), pool.device_uri());
    let mirror = |one: &str, other: &str| format!("mirror:[{one}],[{other}]");
    let legs = format!("mirror:[{}]", LEGS.map(file).join("],["));
    let text = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let rows: Vec<Vec<String>> = vec![
        text(&["identify", &new]),
        text(&["identify", &grown]),
        text(&["identify", &sized("pool", "1t")]),
        text(&["identify", &mirror(&new, &grown)]),
        text(&["identify", &format!("volume:[{new}]/x")]),
        text(&["perf", &new, "-t", "1"]),
        text(&["perf", &grown, "-w", "write", "-t", "1"]),
        text(&["perf", &new, "-w", "write", "-o", "1000", "-t", "1"]),
        text(&["perf", &new, &grown, "-w", "randwrite", "-t", "1"]),
        text(&["copy", &file("data"), &sized("small", "8m")]),
        text(&["copy", &sized("data", "8m"), &file("new")]),
        text(&["copy", &file("data"), &sized("new", "1m")]),
        text(&["pool", "create", &sized("new", "1m")]),
        text(&["pool", "create", &grown]),
        text(&["pool", "create", &new, &grown]),
        text(&["pool", "create", &new, &sized("other", "4k")]),
        text(&["pool", "open", &new]),
        text(&["pool", "open", &grown]),
        text(&["pool", "list", &store, &new]),
        text(&["pool", "check", &grown]),
        text(&["pool", "scrub", &new]),
        text(&["pool", "grow", &store, "--add", &grown]),
        text(&["pool", "grow", &store, "--add", &sized("new", "4k")]),
        text(&["pool", "grow", &grown]),
        text(&["pool", "set", &grown, "--thresholds", "70"]),
        text(&["pool", "rescue", &new, &sized("other", "8m")]),
        text(&["pool", "rescue", &store, &new]),
        text(&["mirror", "create", &new, &sized("other", "4k")]),
        text(&["mirror", "create", &new, &grown]),
        text(&["mirror", "create", &new, &format!("{}&block=4k", sized("other", "8m"))]),
        text(&["mirror", "show", &mirror(&new, &grown)]),
        text(&["mirror", "add", &mirror(&new, &grown), &sized("other", "8m")]),
        text(&["mirror", "replace", &mirror(&file("small"), &new), "0", &sized("other", "8m")]),
        text(&["mirror", "remove", &mirror(&new, &grown), "0"]),
        text(&["mirror", "remove", &legs, "0"]),
        text(&["mirror", "remove", &legs, "5", "--yes"]),
        text(&["mirror", "add", &legs, &sized("copy", "9m"), "--overwrite"]),
        text(&["mirror", "add", &legs, &sized("new", "4k")]),
        text(&["mirror", "add", &legs, &grown]),
        text(&["mirror", "replace", &legs, "0", &sized("new", "8m")]),
        text(&["mirror", "replace", &legs, "5", &sized("new", "8m"), "--yes"]),
        text(&["mirror", "replace", &legs, "0", &sized("new", "4k"), "--yes"]),
        text(&["volume", "create", &format!("volume:[{new}]/x"), "--size", "1m"]),
        text(&["volume", "list", &grown]),
        text(&["volume", "delete", &pool.volume_uri("dv")]),
        text(&["volume", "clone", &pool.volume_uri("x"), "--from", &grown, "--size", "1k"]),
        text(&["serve", &new, "-l", &taken]),
        text(&["serve", &grown, "-l", &taken]),
        text(&["serve", &new, "-l", "nbd://0.0.0.0:0"]),
        text(&["serve", &new, "-l", "nbd:/no/such/directory/socket"]),
        text(&["serve", &new, "-l", "tcp://127.0.0.1:0", "--nqn", "nonsense"]),
        text(&["serve", &new, "-l", "vhost-user:/no/such/directory/socket"]),
        text(&["serve", &new, "-l", "vfio-user:/no/such/directory/socket"]),
    ];
    let before = contents(pool.path("").as_path());
    let made_later = supports_o_tmpfile(&pool.path(""));
    if !made_later {
        println!("skipped: times of change, for want of O_TMPFILE here");
    }
    let mut wrong = Vec::new();
    for words in rows {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let times = changed_at(&pool.path(""));
        let (code, error) = pool.exit_code_and_stderr(&words);
        if code.is_none_or(|code| code == 0) {
            wrong.push(format!("{words:?} was not refused"));
        }
        let after = contents(pool.path("").as_path());
        let differ = |name: &&String| before.get(*name) != after.get(*name);
        let changed: Vec<_> = before.keys().chain(after.keys()).filter(differ).collect();
        if made_later && changed_at(&pool.path("")) != times {
            wrong.push(format!("{words:?} made or changed something, and put it back: {error}"));
        }
        if !changed.is_empty() {
            wrong.push(format!("{words:?} changed {changed:?}, and said: {error}"));
            break;
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn pool_is_created_on_a_zeroed_file_of_an_earlier_command() {
    let pool = pool_with_files();
    for zeroes in [true, false] {
        let name = if zeroes { "written" } else { "hole" };
        let file = std::fs::File::create(pool.path(name)).unwrap();
        file.set_len(8 << 20).unwrap();
        if zeroes {
            std::fs::write(pool.path(name), vec![0; 8 * MIB]).unwrap();
        }
        pool.stdout_of_success(&["pool", "create", &pool.file_uri(name)]);
    }
    let mut middle = vec![0; 8 * MIB];
    middle[4 * MIB] = 1;
    std::fs::write(pool.path("middle"), middle).unwrap();
    let (_, error) = pool.exit_code_and_stderr(&["pool", "create", &pool.file_uri("middle")]);
    assert!(error.contains("would destroy what is there"), "{error}");
}

#[test]
fn identify_leaves_a_readable_file_unchanged() {
    let pool = pool_with_files();
    let before = contents(pool.path("").as_path());
    pool.stdout_of_success(&["identify", &format!("{}?size=1m", pool.file_uri("data"))]);
    pool.stdout_of_success(&["perf", &pool.file_uri("data"), "-t", "0.1"]);
    assert!(contents(pool.path("").as_path()) == before);
}

#[test]
fn takeover_rejects_a_file_of_another_length() {
    let pool = pool_with_files();
    let legs = ["one", "two"].map(|name| pool.file_uri(name));
    let made = legs.each_ref().map(|leg| format!("{leg}?size=8m"));
    pool.stdout_of_success(&["mirror", "create", &made[0], &made[1]]);
    let before = contents(pool.path("").as_path());
    let store = format!("{}?size=1g", pool.device_uri());
    let mirror = |one: &str, other: &str| format!("mirror:[{one}],[{other}]");
    let both = legs.each_ref().map(|leg| format!("{leg}?size=1g"));
    let new = format!("{}?size=8m", pool.file_uri("new"));
    for (command, uri, name) in [
        ("pool", &store, "pool"),
        ("pool", &new, "new"),
        ("mirror", &mirror(&both[0], &both[1]), "one"),
        ("mirror", &mirror(&legs[0], &both[1]), "two"),
        ("mirror", &mirror(&legs[0], &new), "new"),
    ] {
        for force in [&["--force"][..], &[]] {
            let words = [&[command, "takeover", uri], force].concat();
            let (code, error) = pool.exit_code_and_stderr(&words);
            assert!(code.is_some_and(|code| code != 0), "{words:?}");
            let path = pool.path(name).display().to_string();
            assert!(error.contains(&path), "{words:?}: {error}");
            assert!(contents(pool.path("").as_path()) == before, "{words:?}: {error}");
        }
    }
    pool.stdout_of_success(&["mirror", "takeover", "--force", &mirror(&made[0], &made[1])]);
    pool.stdout_of_success(&[
        "pool",
        "takeover",
        "--force",
        &format!("{}?size=16m", pool.device_uri()),
    ]);
}

#[test]
fn file_size_limit_is_an_error_and_no_signal() {
    let pool = pool_with_files();
    let tenmil = env!("CARGO_BIN_EXE_tenmil");
    let line = format!(
        "ulimit -f 64; exec {tenmil} copy {} {}",
        pool.file_uri("data"),
        pool.file_uri("new")
    );
    let output = std::process::Command::new("sh")
        .args(["-c", &line])
        .env("XDG_RUNTIME_DIR", pool.path(""))
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code().is_some_and(|code| code != 0), "{:?}: {error}", output.status);
    assert!(!pool.path("new").exists(), "{error}");
}
