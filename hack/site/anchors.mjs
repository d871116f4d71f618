// anchors.mjs SITE: fails if a link of a page leads to a section that does not exist. VitePress checks the pages.
import { readdirSync, readFileSync } from 'node:fs'
import { join, posix } from 'node:path'

const site = process.argv[2]
const files = readdirSync(site, { recursive: true }).filter(f => f.endsWith('.html'))
const page = file => readFileSync(join(site, file), 'utf8')
const ids = new Map(files.map(f => [f, new Set([...page(f).matchAll(/ id="([^"]+)"/g)].map(m => m[1]))]))
const dead = files.flatMap(f => [...page(f).matchAll(/ href="([^":]*)#([^"]+)"/g)].flatMap(([, path, anchor]) => {
  const to = path === '' ? f : posix.join(posix.dirname(f), path.endsWith('/') ? path + 'index.html' : path)
  return ids.get(to)?.has(decodeURIComponent(anchor)) ? [] : [`${f}: ${path}#${anchor}`]
}))
for (const link of dead) console.error('dead link', link)
process.exit(dead.length ? 1 : 0)
