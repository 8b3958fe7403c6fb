//! Device URIs: one line that describes a stack of block devices.
//!
//! ```text
//!   ram:1g                                     blocks in memory
//!   file:/var/tmp/disk?size=1g&block=4k        blocks in a file, created if it does not exist
//!   delay:[ram:1g]?read=80us                   one device stacked on another
//!   stripe:[file:/a],[delay:[ram:1g]]?chunk=64k
//!   volume:[file:/a]/db                        a volume of the pool on a device
//!
//!   uri    = scheme ":" body [ "?" key "=" value *( "&" key "=" value ) ]
//!   body   = path  |  "[" uri "]" *( "," "[" uri "]" ) [ "/" path ]
//! ```
//!
//! Schemes and keys consist of letters, digits and hyphens.
//!
//! In a path or a value, `%` and two hexadecimal digits encode a byte. Characters of the grammar must be
//! encoded so: `%` everywhere; `?` and a leading `[` in a path; `&` in a value; and unbalanced brackets
//! inside other brackets.
//!
//! Wherever a URI is expected, a path may stand in its place: see [`short_form`].

mod options;
mod renamed_options;
mod short_form;

use std::fmt;
use std::str::FromStr;

use tenmil_base::ErrorCategory;

pub use self::options::UriOptions;
pub use self::short_form::{short_form_for_terminal, with_default_port};

/// A parsed device URI with the URIs of the devices below.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uri {
    scheme: String,
    body: UriBody,
    /// Options in the order they were given, decoded.
    pairs: Vec<(String, String)>,
}

/// The part between the scheme and the question mark.
#[derive(Clone, Debug, PartialEq, Eq)]
enum UriBody {
    Path(String),
    /// Child devices and the path behind them, which may be empty.
    Children(Vec<Uri>, String),
}

/// An invalid URI: its full text, the problem, and what is expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UriError {
    uri: String,
    problem: String,
}

/// Maximum nesting depth of stacked devices.
pub const STACK_DEPTH_MAX: usize = 16;
/// Maximum number of devices directly below one device.
pub const CHILDREN_MAX: usize = 256;

impl Uri {
    /// A device without children, named by `path`, which may contain any characters.
    pub fn new(scheme: impl Into<String>, path: impl Into<String>) -> Self {
        Self { scheme: scheme.into(), body: UriBody::Path(path.into()), pairs: Vec::new() }
    }

    /// A device of type `scheme` at `path` on `below`.
    pub fn with_child(scheme: impl Into<String>, below: Uri, path: impl Into<String>) -> Self {
        let body = UriBody::Children(vec![below], path.into());
        Self { scheme: scheme.into(), body, pairs: Vec::new() }
    }

    /// The same device type and options with another path.
    #[must_use]
    pub fn with_path(&self, path: impl Into<String>) -> Self {
        let mut uri = self.clone();
        let (UriBody::Path(own) | UriBody::Children(_, own)) = &mut uri.body;
        *own = path.into();
        uri
    }

    /// Adds an option.
    #[must_use]
    pub fn with_option(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.pairs.push((key.into(), value.into()));
        self
    }

    /// The URI opened read-only: `file:` and `rbd:` devices get the read-only option, except below devices that
    /// [write on their own](Self::writes_when_read_only).
    #[must_use]
    pub fn read_only(mut self) -> Self {
        let is_written = self.writes_when_read_only();
        match &mut self.body {
            UriBody::Children(children, _) if !is_written => {
                for child in children {
                    *child = child.clone().read_only();
                }
            }
            UriBody::Path(_) if ["file", "rbd"].contains(&&*self.scheme) => {
                self.pairs.retain(|(key, _)| key != "read-only");
                self.pairs.push(("read-only".into(), "yes".into()));
            }
            _ => {}
        }
        self
    }

    /// The URI for probing, independent of the working directory: no file is created or resized, and each
    /// path is absolute.
    #[must_use]
    pub fn for_probing(mut self) -> Self {
        match &mut self.body {
            UriBody::Children(children, _) => {
                for child in children {
                    *child = child.clone().for_probing();
                }
            }
            UriBody::Path(_) => {
                if self.scheme == "file" {
                    self.pairs.retain(|(key, _)| key != "size");
                }
                return self.with_absolute_paths();
            }
        }
        self
    }

    /// The URI independent of the working directory: each file path is absolute.
    #[must_use]
    pub fn with_absolute_paths(mut self) -> Self {
        match &mut self.body {
            UriBody::Children(children, _) => {
                for child in children {
                    *child = child.clone().with_absolute_paths();
                }
            }
            UriBody::Path(path) if self.scheme == "file" => {
                if let Ok(whole) = std::path::absolute(&*path) {
                    *path = whole.to_string_lossy().into_owned();
                }
            }
            UriBody::Path(_) => {}
        }
        self
    }

    /// Replaces each child device by the result of `change`.
    ///
    /// # Errors
    ///
    /// The first error that `change` returns.
    pub fn try_map_children<E>(
        mut self,
        mut change: impl FnMut(Self) -> Result<Self, E>,
    ) -> Result<Self, E> {
        if let UriBody::Children(children, _) = &mut self.body {
            for child in children {
                *child = change(std::mem::replace(child, Self::new("", "")))?;
            }
        }
        Ok(self)
    }

    /// The same with the present names of parameters that were renamed since version 0.1.
    #[must_use]
    pub fn with_renamed_keys(mut self) -> Self {
        for (key, _) in &mut self.pairs {
            if let Some(new) = renamed_options::renamed_key(&self.scheme, key) {
                new.clone_into(key);
            }
        }
        if let UriBody::Children(children, _) = &mut self.body {
            for child in children {
                *child = child.clone().with_renamed_keys();
            }
        }
        self
    }

    /// Whether the device writes to those below it even if it is opened read-only. A mirror writes its
    /// superblocks; in a pool, another volume may be open for writing.
    pub fn writes_when_read_only(&self) -> bool {
        ["mirror", "volume"].contains(&&*self.scheme)
    }

    /// The scheme, which is the device type: `ram`, `file`, `stripe`.
    pub fn scheme(&self) -> &str {
        &self.scheme
    }

    /// The path after the scheme, or the path after the bracketed child devices and a slash.
    pub fn path(&self) -> &str {
        let (UriBody::Path(path) | UriBody::Children(_, path)) = &self.body;
        path
    }

    /// The child devices, in order.
    pub fn children(&self) -> &[Uri] {
        match &self.body {
            UriBody::Path(_) => &[],
            UriBody::Children(children, _) => children,
        }
    }

    /// The options, to be consumed one by one.
    pub fn options(&self) -> UriOptions<'_> {
        UriOptions::new(self, &self.pairs)
    }

    /// The single child device.
    ///
    /// # Errors
    ///
    /// If there is not exactly one.
    pub fn single_child(&self) -> Result<&Uri, UriError> {
        match self.children() {
            [only] => Ok(only),
            others => Err(self.error(format!(
                "stands on {} devices, expected one in brackets: {}:[ram:1g]",
                others.len(),
                self.scheme
            ))),
        }
    }

    /// Creates an error about this URI.
    pub fn error(&self, problem: impl fmt::Display) -> UriError {
        UriError { uri: format!("{self:#}"), problem: problem.to_string() }
    }

    /// Parses a URI or a path. `named` returns the device of a configuration file with a name.
    ///
    /// # Errors
    ///
    /// If the text is malformed, or is the path of no file.
    pub fn parse_with_named_devices(
        text: &str,
        named: &dyn Fn(&str) -> Option<Self>,
    ) -> Result<Self, UriError> {
        Self::parse(text, 1, named)
    }

    fn parse(
        text: &str,
        depth: usize,
        named: &dyn Fn(&str) -> Option<Self>,
    ) -> Result<Self, UriError> {
        let refuse = |problem: String| UriError { uri: text.into(), problem };
        let too_deep = || refuse(format!("more than {STACK_DEPTH_MAX} devices upon each other"));
        if depth > STACK_DEPTH_MAX {
            return Err(too_deep());
        }
        let Some((scheme, rest)) = text.split_once(':').filter(|(scheme, _)| is_identifier(scheme))
        else {
            let (mut uri, query) = short_form::parse_path_form(text, named).map_err(refuse)?;
            if depth == STACK_DEPTH_MAX && !uri.children().is_empty() {
                return Err(too_deep());
            }
            uri.pairs = parse_pairs(query).map_err(refuse)?;
            return Ok(uri);
        };
        let (body, query) = if rest.starts_with('[') {
            let (children, path, query) = split_children(rest).map_err(refuse)?;
            let children = children.into_iter().map(|child| Self::parse(child, depth + 1, named));
            let path =
                percent_decode(path).ok_or_else(|| refuse(escape_error("the path", path)))?;
            (UriBody::Children(children.collect::<Result<_, _>>()?, path), query)
        } else {
            let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
            let path =
                percent_decode(path).ok_or_else(|| refuse(escape_error("the path", path)))?;
            (UriBody::Path(path), query)
        };
        let pairs = parse_pairs(query).map_err(refuse)?;
        let mut uri = Self { scheme: scheme.into(), body, pairs };
        short_form::expand_short_form(&mut uri);
        Ok(uri)
    }
}

impl FromStr for Uri {
    type Err = UriError;

    /// Parses a URI or a path, which may need a look at the file system.
    fn from_str(text: &str) -> Result<Self, UriError> {
        Self::parse_with_named_devices(text, &|_| None)
    }
}

/// Whether the text is a valid scheme or key.
fn is_identifier(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

/// Splits `[a],[b]/path?query` into `a`, `b`, `path` and `query`.
fn split_children(mut rest: &str) -> Result<(Vec<&str>, &str, &str), String> {
    let mut children = Vec::new();
    while let Some(inside) = rest.strip_prefix('[') {
        let mut open = 1_usize;
        let end = inside.bytes().position(|byte| {
            open += usize::from(byte == b'[');
            open -= usize::from(byte == b']');
            open == 0
        });
        let end = end.ok_or("a bracket is not closed, expected as many ] as [")?;
        if children.len() == CHILDREN_MAX {
            return Err(format!("stands on more than {CHILDREN_MAX} devices"));
        }
        children.push(&inside[..end]);
        rest = &inside[end + 1..];
        match rest.strip_prefix(',') {
            Some(more) if more.starts_with('[') => rest = more,
            _ => break,
        }
    }
    let (behind, query) = rest.split_once('?').unwrap_or((rest, ""));
    match behind.strip_prefix('/') {
        Some(path) => Ok((children, path, query)),
        None if behind.is_empty() => Ok((children, "", query)),
        None => Err(format!("`{rest}` follows a bracket, expected ,[URI] or ?KEY=VALUE")),
    }
}

fn parse_pairs(query: &str) -> Result<Vec<(String, String)>, String> {
    let mut pairs: Vec<(String, String)> = Vec::new();
    for part in query.split('&').filter(|part| !part.is_empty()) {
        let (key, value) = part
            .split_once('=')
            .ok_or_else(|| format!("`{part}` is not a parameter, expected KEY=VALUE"))?;
        if !is_identifier(key) {
            return Err(format!("`{key}` is not a key, expected letters, digits and hyphens"));
        }
        if pairs.iter().any(|(earlier, _)| earlier == key) {
            return Err(format!("{key} is given twice, expected once"));
        }
        let value = percent_decode(value).ok_or_else(|| escape_error(key, value))?;
        pairs.push((key.into(), value));
    }
    Ok(pairs)
}

fn escape_error(what: &str, text: &str) -> String {
    format!("{what} is `{text}`, expected two hexadecimal digits after a per cent sign")
}

/// Replaces `%` and two hexadecimal digits by the byte they encode.
fn percent_decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let mut digit = || char::from(rest.next()?).to_digit(16);
            bytes.push(u8::try_from(digit()? << 4 | digit()?).ok()?);
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}

/// Writes `text` with an escape for each character of `special`.
fn percent_encode(out: &mut fmt::Formatter<'_>, text: &str, special: &str) -> fmt::Result {
    text.chars().try_for_each(|letter| {
        if special.contains(letter) {
            write!(out, "%{:02x}", u32::from(letter))
        } else {
            write!(out, "{letter}")
        }
    })
}

impl fmt::Display for Uri {
    /// Writes a text that parses to the same URI, whatever files exist. The alternate form, `{:#}`, is for
    /// messages: the shortest text that parses to the same URI now.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_short = out.alternate();
        if let Some(text) = is_short.then(|| short_form::short_form_if_unambiguous(self)).flatten()
        {
            return out.write_str(&text);
        }
        write!(out, "{}:", self.scheme)?;
        match &self.body {
            UriBody::Path(path) => percent_encode(out, path, "%?[]")?,
            UriBody::Children(children, path) => {
                for (index, child) in children.iter().enumerate() {
                    out.write_str(if index == 0 { "[" } else { ",[" })?;
                    fmt::Display::fmt(child, out)?;
                    out.write_str("]")?;
                }
                if !path.is_empty() {
                    out.write_str("/")?;
                    percent_encode(out, path, "%?[]")?;
                }
            }
        }
        for (index, (key, value)) in self.pairs.iter().enumerate() {
            write!(out, "{}{key}=", if index == 0 { '?' } else { '&' })?;
            percent_encode(out, value, "%&[]")?;
        }
        Ok(())
    }
}

impl UriError {
    /// Always [`ErrorCategory::Usage`].
    pub const fn category(&self) -> ErrorCategory {
        ErrorCategory::Usage
    }
}

impl fmt::Display for UriError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.uri, self.problem)
    }
}

impl std::error::Error for UriError {}

#[cfg(test)]
mod tests {
    use super::{Uri, percent_decode};

    fn parse(text: &str) -> Uri {
        text.parse().unwrap()
    }

    #[test]
    fn absolute_paths_apply_to_nested_files_only() {
        let here = std::env::current_dir().unwrap();
        let whole = |name: &str| here.join(name).display().to_string();
        let (a, b) = (whole("a"), whole("b"));
        for (text, expected) in [
            ("file:a?size=1g", format!("file:{a}?size=1g")),
            ("file:/a", "file:/a".to_owned()),
            (
                "mirror:[file:a?block=512],[delay:[file:b]]",
                format!("mirror:[file:{a}?block=512],[delay:[file:{b}]]"),
            ),
            ("ram:1g", "ram:1g".to_owned()),
        ] {
            assert_eq!(parse(text).with_absolute_paths().to_string(), expected);
        }
        assert_eq!(parse("file:a?size=1g").for_probing().to_string(), format!("file:{a}"));
    }

    #[test]
    fn uri_text_round_trips() {
        for text in [
            "null:",
            "ram:1g?block=4k",
            "file:/a/b:c?size=1g&block=512",
            "delay:[ram:1g]?read=80us&write=1ms",
            "stripe:[file:/a?size=1m],[delay:[mirror:[ram:1m],[ram:1m]]]?chunk=64k",
            "file:/odd%3f%25%5bname%5d?x=a=b%26c",
            "volume:[file:/a?size=1g]/db",
            "delay:[volume:[file:/a]/a/b%3f%5d]?read=1us",
        ] {
            assert_eq!(parse(text).to_string(), text);
            assert_eq!(parse(&parse(text).to_string()), parse(text));
        }
    }

    #[test]
    fn built_uri_round_trips() {
        let uri =
            Uri::new("file", "/50%?[x]").with_option("size", "1g").with_option("note", "a&b=[c]");
        assert_eq!(uri.to_string(), "file:/50%25%3f%5bx%5d?size=1g&note=a%26b=%5bc%5d");
        assert_eq!(parse(&uri.to_string()), uri);
    }

    #[test]
    fn path_is_replaced_and_all_else_kept() {
        assert_eq!(parse("rbd:p/i?user=u").with_path("p/j@s"), parse("rbd:p/j@s?user=u"));
        assert_eq!(parse("volume:[ram:1m]/a?x=1").with_path("b"), parse("volume:[ram:1m]/b?x=1"));
    }

    #[test]
    fn read_only_uri_marks_every_file() {
        for (text, expected) in [
            ("ram:1g", "ram:1g"),
            ("file:/a?size=1m", "file:/a?size=1m&read-only=yes"),
            ("file:/a?read-only=no", "file:/a?read-only=yes"),
            (
                "stripe:[file:/a],[delay:[file:/b]]",
                "stripe:[file:/a?read-only=yes],[delay:[file:/b?read-only=yes]]",
            ),
            ("rbd:p/i?user=u", "rbd:p/i?user=u&read-only=yes"),
            ("mirror:[file:/a],[file:/b]", "mirror:[file:/a],[file:/b]"),
            ("volume:[file:/a]/b", "volume:[file:/a]/b"),
        ] {
            assert_eq!(parse(text).read_only(), parse(expected));
        }
    }

    #[test]
    fn uri_parts_are_parsed() {
        let uri = parse("stripe:[file:/a?size=1m],[ram:2m]?chunk=64k");
        assert_eq!((uri.scheme(), uri.path(), uri.children().len()), ("stripe", "", 2));
        assert_eq!(uri.children()[0].path(), "/a");
        assert_eq!(uri.children()[0].options().text_value("size").as_deref(), Some("1m"));
        let mut fields = uri.options();
        assert_eq!(fields.text_value("chunk").as_deref(), Some("64k"));
        assert_eq!(parse("file:/a%20b").path(), "/a b");
        let on = parse("volume:[file:/a?size=1m]/d%20b?x=y");
        assert_eq!((on.path(), on.children().len()), ("d b", 1));
        assert_eq!(on.options().text_value("x").as_deref(), Some("y"));
        let made = Uri::with_child("volume", parse("file:/a?size=1m"), "d b").with_option("x", "y");
        assert_eq!(made, on);
        assert_eq!(parse("file:/[x]").path(), "/[x]", "only a leading bracket opens a device");
    }

    #[test]
    fn invalid_uri_is_rejected_with_the_accepted_form() {
        let escape = "expected two hexadecimal digits after a per cent sign";
        for (text, problem) in [
            ("delay:[ram:1g", "a bracket is not closed, expected as many ] as ["),
            ("delay:[ram:1g]x", "`x` follows a bracket, expected ,[URI] or ?KEY=VALUE"),
            ("delay:[ram:1g],ram:1g", "`,ram:1g` follows a bracket, expected ,[URI] or ?KEY=VALUE"),
            ("ram:1g?size", "`size` is not a parameter, expected KEY=VALUE"),
            ("ram:1g?=1", "`` is not a key, expected letters, digits and hyphens"),
            ("ram:1g?a]=1", "`a]` is not a key, expected letters, digits and hyphens"),
            ("ram:1g?size=1&size=2", "size is given twice, expected once"),
            ("file:/%2", &format!("the path is `/%2`, {escape}")),
            ("ram:?size=%zz", &format!("size is `%zz`, {escape}")),
        ] {
            let error = text.parse::<Uri>().unwrap_err();
            assert_eq!(error.to_string(), format!("{text}: {problem}"));
        }
        assert_eq!(
            parse("delay:ram").single_child().unwrap_err().to_string(),
            "delay:ram: stands on 0 devices, expected one in brackets: delay:[ram:1g]"
        );
    }

    #[test]
    fn uri_depth_and_children_are_bounded() {
        let tower = |depths: usize| {
            let (open, close) = ("delay:[".repeat(depths - 1), "]".repeat(depths - 1));
            format!("{open}ram:1g{close}").parse::<Uri>()
        };
        tower(16).unwrap();
        assert!(tower(17).unwrap_err().to_string().contains("more than 16 devices"));
        let wide =
            |count: usize| format!("stripe:{}", vec!["[ram:1g]"; count].join(",")).parse::<Uri>();
        wide(256).unwrap();
        assert!(wide(257).unwrap_err().to_string().ends_with("stands on more than 256 devices"));
        assert!("[".repeat(100_000).parse::<Uri>().is_err());
    }

    #[test]
    fn path_may_contain_escaped_delimiters() {
        assert_eq!(percent_decode("/a%26b%3dc%25"), Some("/a&b=c%".into()));
        assert_eq!(percent_decode("caf%c3%a9"), Some("café".into()));
        for text in ["%", "%4", "%zz", "%ff"] {
            assert_eq!(percent_decode(text), None, "{text}");
        }
    }
}
