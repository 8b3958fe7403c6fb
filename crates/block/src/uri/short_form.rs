//! Short forms of device URIs, which no shell interprets.
//!
//! ```text
//!   /dev/sda  ./disk  disk        a file or block device that exists:   file:/dev/sda
//!   /var/tmp/pool/db              a volume of the pool in a file:       volume:[file:/var/tmp/pool]/db
//!   disks  disks/db               a device of the configuration file:   device:disks  volume:[device:disks]/db
//!   tcp://HOST/NQN/1              port 4420, and the namespace:         tcp://HOST:4420/NQN?ns=1
//! ```
//!
//! A name that begins with letters, digits or hyphens and a colon is a URI. Any other name is a path. The first
//! component that is not a directory ends the path of the file, and the name of a volume follows it: a file
//! contains no other files, so both cannot be meant. In a configuration file the first component is looked up
//! among the named devices before; `./` in front of a path excludes them. Options follow a question mark, and `%`
//! encodes a byte, as in a URI.

use std::io::ErrorKind;

use tenmil_base::text::escape;

use super::{Uri, UriBody, percent_decode};

/// The scheme of a file.
const FILE: &str = "file";
/// The scheme of a volume of a pool.
const VOLUME: &str = "volume";
/// The scheme of a namespace over NVMe/TCP.
const TCP: &str = "tcp";
/// The port of NVMe/TCP (TCP transport 1.1 §3.1.1).
const TCP_PORT: u16 = 4420;

/// Looks up a device of a configuration file by its name.
pub(super) type NamedDeviceLookup<'a> = &'a dyn Fn(&str) -> Option<Uri>;

/// The device at a path and the query of its options, or the problem with the path.
pub(super) fn parse_path_form<'a>(
    text: &'a str,
    named: NamedDeviceLookup<'_>,
) -> Result<(Uri, &'a str), String> {
    let (path, query) = text.split_once('?').unwrap_or((text, ""));
    let path = percent_decode(path).ok_or_else(|| super::escape_error("the path", path))?;
    if path.is_empty() {
        return Err(format!("no device is named, {EXPECTED}"));
    }
    let (first, volume) =
        path.split_once('/').map_or((&*path, None), |(first, behind)| (first, Some(behind)));
    if let Some(device) = named(first).filter(|_| !first.is_empty()) {
        let uri = match volume {
            Some(volume) => Uri::with_child(VOLUME, device, volume),
            None => device,
        };
        return Ok((uri, query));
    }
    match split_file_path(&path) {
        Ok((file, None)) => Ok((Uri::new(FILE, file), query)),
        Ok((file, Some(volume))) => {
            Ok((Uri::with_child(VOLUME, Uri::new(FILE, file), volume), query))
        }
        Err(problem) => Err(format!("{problem}, {EXPECTED}{}", create_file_hint(text, query))),
    }
}

const EXPECTED: &str = "expected KIND:… such as ram:1g, or the path of a file or block device";

/// The command-line argument that creates a file, if the text can be one.
fn create_file_hint(text: &str, query: &str) -> String {
    match text.contains(['[', ']']) {
        true => String::new(),
        false if query.is_empty() => format!("; a new file is `{FILE}:{text}?size=1g`"),
        false => format!("; a new file is `{FILE}:{text}`"),
    }
}

/// Splits a path behind its first component that is not a directory.
fn split_file_path(path: &str) -> Result<(&str, Option<&str>), String> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => Err("it is a directory".to_owned()),
        Ok(_) => Ok((path, None)),
        Err(error) if error.kind() == ErrorKind::NotADirectory => {
            let is_file =
                |at: &usize| std::fs::metadata(&path[..*at]).is_ok_and(|found| !found.is_dir());
            let mut ends = path.match_indices('/').map(|(at, _)| at);
            let end = ends.find(is_file).ok_or_else(|| error.to_string())?;
            Ok((&path[..end], Some(&path[end + 1..])))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err("no such file or directory".to_owned())
        }
        Err(error) => Err(error.to_string()),
    }
}

/// Adds the port of NVMe/TCP to each address without one, and makes the namespace at the end of the path a
/// parameter. Beside the parameter `ns` the whole path is the NQN, which may end in a number.
pub(super) fn expand_short_form(uri: &mut Uri) {
    let UriBody::Path(path) = &mut uri.body else { return };
    let Some(rest) = path.strip_prefix("//").filter(|_| uri.scheme == TCP) else { return };
    let Some((addresses, mut subsystem)) = rest.split_once('/') else { return };
    if let Some((nqn, number)) = subsystem.rsplit_once('/')
        && is_number(number)
        && !uri.pairs.iter().any(|(key, _)| key == "ns")
    {
        uri.pairs.insert(0, ("ns".into(), number.into()));
        subsystem = nqn;
    }
    let addresses: Vec<String> =
        addresses.split(',').map(|address| with_default_port(address, TCP_PORT)).collect();
    *path = format!("//{}/{subsystem}", addresses.join(","));
}

/// Adds a port to an address without one. Empty text stays as it is.
pub fn with_default_port(address: &str, port: u16) -> String {
    let has_port = address.is_empty()
        || match address.starts_with('[') {
            true => !address.ends_with(']'),
            false => address.contains(':'),
        };
    if has_port { address.to_owned() } else { format!("{address}:{port}") }
}

/// The short form of the URI `text`, for a terminal; text that is no URI is returned as it is.
pub fn short_form_for_terminal(text: &str) -> String {
    let short = text.parse::<Uri>().map(|uri| format!("{uri:#}"));
    escape(short.as_deref().unwrap_or(text))
}

/// The short form, if it names the same device.
pub(super) fn short_form_if_unambiguous(uri: &Uri) -> Option<String> {
    let file = |uri: &Uri| match (&uri.body, &*uri.scheme, &uri.pairs[..]) {
        (UriBody::Path(path), FILE, []) => Some(path.clone()),
        _ => None,
    };
    let text = match (&uri.body, &*uri.scheme, &uri.pairs[..]) {
        (_, FILE, []) => escape_path(&file(uri)?),
        (UriBody::Children(children, volume), VOLUME, []) => {
            let [pool] = &children[..] else { return None };
            escape_path(&format!("{}/{volume}", file(pool)?))
        }
        (UriBody::Path(nqn), TCP, [(key, number)]) if key == "ns" => {
            format!("{TCP}:{}/{number}", escape_path(nqn))
        }
        _ => return None,
    };
    // A command would take a leading hyphen for an option.
    let is_same = !text.starts_with('-') && text.parse::<Uri>().is_ok_and(|named| named == *uri);
    is_same.then_some(text)
}

/// Encodes the characters of a path that end it. Balanced brackets, as around an IPv6 address, do not.
fn escape_path(path: &str) -> String {
    let path = path.replace('%', "%25").replace('?', "%3f");
    let open = path.bytes().try_fold(0_usize, |open, byte| match byte {
        b'[' => Some(open + 1),
        b']' => open.checked_sub(1),
        _ => Some(open),
    });
    match open {
        Some(0) => path,
        _ => path.replace('[', "%5b").replace(']', "%5d"),
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::{Uri, with_default_port};

    fn parse_uri(text: &str) -> Uri {
        text.parse().unwrap()
    }

    /// A directory with an empty file `disk`, and its path.
    fn temporary_directory() -> (tempfile::TempDir, String) {
        let directory = tempfile::tempdir().unwrap();
        std::fs::File::create_new(directory.path().join("disk")).unwrap();
        let path = directory.path().display().to_string();
        (directory, path)
    }

    #[test]
    fn existing_path_is_a_file_and_what_follows_a_file_is_a_volume() {
        let (_directory, here) = temporary_directory();
        for (short, whole) in [
            (format!("{here}/disk"), format!("file:{here}/disk")),
            (format!("{here}/./disk?block=4k"), format!("file:{here}/./disk?block=4k")),
            (format!("{here}/disk/db"), format!("volume:[file:{here}/disk]/db")),
            (format!("{here}/disk/a/b"), format!("volume:[file:{here}/disk]/a/b")),
            (format!("{here}/disk/"), format!("volume:[file:{here}/disk]")),
            (
                format!("{here}/disk/db?metadata-cache=1m"),
                format!("volume:[file:{here}/disk]/db?metadata-cache=1m"),
            ),
            (
                format!("mirror:[{here}/disk],[delay:[{here}/disk/db]]"),
                format!("mirror:[file:{here}/disk],[delay:[volume:[file:{here}/disk]/db]]"),
            ),
            ("Cargo.toml".into(), "file:Cargo.toml".into()),
            ("./Cargo.toml/db".into(), "volume:[file:./Cargo.toml]/db".into()),
            ("/dev/null".into(), "file:/dev/null".into()),
        ] {
            assert_eq!(parse_uri(&short).to_string(), whole, "{short}");
            assert_eq!(parse_uri(&short), parse_uri(&whole), "{short}");
        }
    }

    #[test]
    fn absent_path_is_refused_with_the_command_that_creates_it() {
        let (_directory, here) = temporary_directory();
        let new = |text: &str| format!("; a new file is `file:{text}`");
        for (text, problem, suggestion) in [
            ("./nothing".to_owned(), "no such file or directory", new("./nothing?size=1g")),
            ("./nothing?size=1m".to_owned(), "no such file or directory", new("./nothing?size=1m")),
            (format!("{here}/pool/db"), "no such file or directory", String::new()),
            (here.clone(), "it is a directory", String::new()),
            ("[ram:1m]".to_owned(), "no such file or directory", String::new()),
            (String::new(), "no device is named", String::new()),
        ] {
            let error = text.parse::<Uri>().unwrap_err().to_string();
            let expected = format!("{text}: {problem}, {}", super::EXPECTED);
            assert!(error.starts_with(&expected) && error.contains(&suggestion), "{error}");
        }
    }

    #[test]
    fn last_number_of_a_tcp_path_is_the_namespace_unless_a_parameter_is() {
        for (short, whole) in [
            ("tcp://h/nqn.x:d/1", "tcp://h:4420/nqn.x:d?ns=1"),
            ("tcp://h:1/nqn.x:d/2?hdgst=yes", "tcp://h:1/nqn.x:d?ns=2&hdgst=yes"),
            ("tcp://h/nqn.x:d?ns=3", "tcp://h:4420/nqn.x:d?ns=3"),
            ("tcp://h/nqn.x:d/7?ns=3", "tcp://h:4420/nqn.x:d/7?ns=3"),
            ("tcp://h/nqn.x:d/7/3", "tcp://h:4420/nqn.x:d/7?ns=3"),
            ("tcp://[::1],h:2/nqn.x:d/1", "tcp://%5b::1%5d:4420,h:2/nqn.x:d?ns=1"),
            ("tcp://h/nqn.x:d", "tcp://h:4420/nqn.x:d"),
            ("tcp://h/1", "tcp://h:4420/1"),
            ("tcp://h:1", "tcp://h:1"),
            ("tcp:x/1", "tcp:x/1"),
        ] {
            assert_eq!(parse_uri(short).to_string(), whole, "{short}");
            assert_eq!(parse_uri(whole), parse_uri(short), "{short}");
        }
        assert_eq!(with_default_port("::1", 1), "::1", "ambiguous: the host looks up nothing");
    }

    #[test]
    fn messages_have_the_short_form_if_it_names_the_same_device() {
        let (_directory, here) = temporary_directory();
        for (text, expected) in [
            (format!("file:{here}/disk"), format!("{here}/disk")),
            (format!("volume:[file:{here}/disk]/db"), format!("{here}/disk/db")),
            (format!("delay:[file:{here}/disk]?read=1us"), format!("delay:[{here}/disk]?read=1us")),
            (format!("file:{here}/disk?block=4k"), format!("file:{here}/disk?block=4k")),
            (format!("file:{here}/none"), format!("file:{here}/none")),
            (format!("volume:[file:{here}/none]/db"), format!("volume:[file:{here}/none]/db")),
            ("tcp://h:1/nqn.x:d?ns=2".into(), "tcp://h:1/nqn.x:d/2".into()),
            ("delay:[tcp://[::1]:1/nqn.x:d?ns=2]".into(), "delay:[tcp://[::1]:1/nqn.x:d/2]".into()),
            ("tcp://h:1/nqn.x:]d?ns=2".into(), "tcp://h:1/nqn.x:%5dd/2".into()),
            ("tcp://h:1/nqn.x:d?ns=2&hdgst=no".into(), "tcp://h:1/nqn.x:d?ns=2&hdgst=no".into()),
            ("ram:1g".into(), "ram:1g".into()),
        ] {
            assert_eq!(format!("{:#}", parse_uri(&text)), expected);
            assert_eq!(parse_uri(&expected), parse_uri(&text));
        }
        let error = parse_uri(&format!("file:{here}/disk")).error("wrong").to_string();
        assert_eq!(error, format!("{here}/disk: wrong"));
    }

    #[test]
    fn device_of_a_configuration_comes_before_a_path_without_a_dot() {
        let named = |name: &str| (name == "Cargo.toml").then(|| Uri::new("device", name));
        let parse = |text: &str| Uri::parse_with_named_devices(text, &named).unwrap().to_string();
        assert_eq!(parse("Cargo.toml"), "device:Cargo.toml");
        assert_eq!(parse("Cargo.toml/db"), "volume:[device:Cargo.toml]/db");
        assert_eq!(
            parse("split:[Cargo.toml]?part=0&parts=2"),
            "split:[device:Cargo.toml]?part=0&parts=2"
        );
        assert_eq!(parse("./Cargo.toml"), "file:./Cargo.toml");
        assert_eq!(parse("./Cargo.toml/db"), "volume:[file:./Cargo.toml]/db");
    }
}
