//! The container image: the static program and nothing else, made by buildah without a daemon.
//!
//! It is made twice, and both have the same digest: nothing in it depends on the time or on the machine.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use super::{output_of, run_command, version};

/// User of the program in a container. No user of a machine has its number.
const USER: &str = "65532";
/// Directories of the image and their modes.
const DIRECTORIES: [(&str, u32); 5] = [
    ("usr/bin", 0o755),
    ("etc/tenmil", 0o755),
    // The control sockets.
    ("tmp", 0o1777),
    // Disks and reservations: a volume.
    ("var/lib/tenmil", 0o777),
    ("run", 0o755),
];

/// Makes the image twice, compares both, and runs it. Returns what is wrong with it.
pub(super) fn make_image(root: &Path, room: &Path, program: &Path) -> Result<Vec<String>, String> {
    let files = room.join("image");
    write_files(root, &files, program)?;
    let image = room.join(format!("tenmil-{}.oci.tar", version()));
    let name = format!("localhost/tenmil:{}", version());
    let first = commit_image(root, &files, &name, &image)?;
    let second = commit_image(root, &files, &name, &image)?;
    let mut problems = Vec::new();
    if first != second {
        problems.push(format!("{name}: two builds have the digests {first} and {second}"));
    }
    println!("package: {}: {first}", image.display());
    problems.extend(run_image(&name)?);
    Ok(problems)
}

/// Writes the file system of the image.
fn write_files(root: &Path, files: &Path, program: &Path) -> Result<(), String> {
    let _ = fs::remove_dir_all(files);
    let in_files = |why| format!("write {}: {why}", files.display());
    for (directory, mode) in DIRECTORIES {
        let directory = files.join(directory);
        fs::create_dir_all(&directory).map_err(in_files)?;
        fs::set_permissions(&directory, fs::Permissions::from_mode(mode)).map_err(in_files)?;
    }
    fs::copy(program, files.join("usr/bin/tenmil")).map_err(in_files)?;
    let configuration = root.join("packaging/config/target.toml");
    fs::copy(configuration, files.join("etc/tenmil/target.toml")).map_err(in_files)?;
    let user = format!("tenmil:x:{USER}:{USER}:tenmil:/var/lib/tenmil:/nonexistent\n");
    fs::write(files.join("etc/passwd"), user).map_err(in_files)?;
    fs::write(files.join("etc/group"), format!("tenmil:x:{USER}:\n")).map_err(in_files)?;
    // Modes of the image do not depend on the umask.
    for (file, mode) in [
        ("usr/bin/tenmil", 0o755),
        ("etc/tenmil/target.toml", 0o644),
        ("etc/passwd", 0o644),
        ("etc/group", 0o644),
        ("etc", 0o755),
        ("usr", 0o755),
        ("var", 0o755),
        ("var/lib", 0o755),
    ] {
        let mode = fs::Permissions::from_mode(mode);
        fs::set_permissions(files.join(file), mode).map_err(in_files)?;
    }
    Ok(())
}

/// A command of buildah that needs neither a daemon nor a user namespace.
fn buildah(words: &[&str]) -> Command {
    let mut command = Command::new("buildah");
    command.args(words).env("BUILDAH_ISOLATION", "chroot").env("STORAGE_DRIVER", "vfs");
    command
}

/// Makes the image `name` and the archive `image`; returns the digest.
fn commit_image(root: &Path, files: &Path, name: &str, image: &Path) -> Result<String, String> {
    let container = output_of("begin the image", &mut buildah(&["from", "scratch"]))?;
    let made = configure_image(root, files, &container)
        .and_then(|()| commit_container(&container, name, image));
    let removed = output_of("remove the container", &mut buildah(&["rm", &container]));
    made.and_then(|digest| removed.map(|_| digest))
}

fn configure_image(root: &Path, files: &Path, container: &str) -> Result<(), String> {
    let from = files.display().to_string();
    output_of("copy files to the image", &mut buildah(&["copy", container, &from, "/"]))?;
    let commit = output_of(
        "read the commit",
        Command::new("git").current_dir(root).args(["rev-parse", "HEAD"]),
    )?;
    let labels = [
        ("title", "tenmil".to_owned()),
        ("description", "User-space NVMe storage stack".to_owned()),
        ("version", version().to_owned()),
        ("revision", commit),
        ("licenses", "MIT OR Apache-2.0".to_owned()),
    ];
    let mut config = buildah(&["config", "--user", USER, "--workingdir", "/var/lib/tenmil"]);
    config.args(["--entrypoint", "[\"/usr/bin/tenmil\"]"]);
    config.args(["--cmd", "serve --config /etc/tenmil/target.toml"]);
    config.args(["--port", "4420/tcp", "--port", "10809/tcp", "--volume", "/var/lib/tenmil"]);
    config.args(["--stop-signal", "SIGTERM"]);
    for (name, value) in labels {
        config.arg("--label").arg(format!("org.opencontainers.image.{name}={value}"));
    }
    output_of("configure the image", config.arg(container)).map(drop)
}

fn commit_container(container: &str, name: &str, image: &Path) -> Result<String, String> {
    let words = ["commit", "--quiet", "--timestamp", "0", "--format", "oci", container, name];
    output_of("commit the image", &mut buildah(&words))?;
    let _ = fs::remove_file(image);
    let digest = image.with_extension("digest");
    let (to, digest_file) =
        (format!("oci-archive:{}", image.display()), digest.display().to_string());
    run_command(
        "write the image",
        &mut buildah(&["push", "--quiet", "--digestfile", &digest_file, name, &to]),
    )?;
    fs::read_to_string(&digest).map_err(|why| format!("read {digest_file}: {why}"))
}

/// Runs the program in a container of the image: it prints its version, and serves and measures memory.
fn run_image(name: &str) -> Result<Vec<String>, String> {
    let container = output_of("begin a container", &mut buildah(&["from", "--pull-never", name]))?;
    let mut problems = Vec::new();
    for words in [&["--version"][..], &["perf", "null:", "-t", "0.5"], &["list"]] {
        let mut run = buildah(&["run", &container, "--", "/usr/bin/tenmil"]);
        if let Err(why) = output_of("run the image", run.args(words)) {
            problems.push(format!("{name}: tenmil {}: {why}", words.join(" ")));
        }
    }
    output_of("remove the container", &mut buildah(&["rm", &container]))?;
    Ok(problems)
}
